"""Make a labelled action-recognition video set from the motion-capture clips that PyPI's ``pybullet`` ships.

The 15 clips (backflip to walk) are replayed on pybullet's humanoid without physics, seen by a random camera in one of
three view sectors, and written as MP4 in the layout of Northwestern-UCLA Multiview:
``aAA/vVV_sSS_eEE.mp4`` with the action AA (01 to 15), the view VV (01 to 03), the subject SS (01 to 05) and the
repetition EE (from 00). ``classes.txt`` holds the names of the actions in the order of AA. A file that is there already
is skipped, and a clip depends on no other clip.

How to run it::

    pip install pybullet==3.2.7 numpy av
    OMP_NUM_THREADS=1 python mocap_videos.py --output DIR
"""

import argparse
import colorsys
import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import pybullet
import pybullet_data

ACTIONS = (
    "backflip",
    "cartwheel",
    "crawl",
    "dance_a",
    "dance_b",
    "getup_facedown",
    "getup_faceup",
    "jump",
    "kick",
    "punch",
    "roll",
    "run",
    "spin",
    "spinkick",
    "walk",
)
# Camera yaw in degrees from the direction the actor faces at the start (0 looks it in the face): centre of each view.
VIEW_CENTRES = (-60.0, 0.0, 60.0)
VIEW_WIDTH = 60.0
SUBJECTS = 5
# Columns of a frame: duration, root position, root quaternion (w, x, y, z), then these joints, by link of the humanoid.
ROOT_POSITION = slice(1, 4)
ROOT_ROTATION = slice(4, 8)
SPHERICAL_JOINTS = {1: 8, 2: 12, 3: 16, 5: 21, 6: 25, 9: 30, 11: 35, 12: 39}  # link: first of four columns
HINGE_JOINTS = {4: 20, 7: 29, 10: 34, 13: 43}  # link: column
HEAD = 2
SUPERSAMPLING = 2
FIELD_OF_VIEW = 45.0
HOLD_SHARE = 0.2
LOGGER = logging.getLogger(__name__)


@dataclass
class Pose:
    """The humanoid at one moment, quaternions as x, y, z, w.

    Attributes:
        position: Root position, y up.
        rotation: Root quaternion.
        joints: Joint position by link: a quaternion, or one angle.
    """

    position: np.ndarray
    rotation: tuple[float, ...]
    joints: dict[int, tuple[float, ...]]


class Motion:
    """A motion-capture clip that can be asked for the pose at any time.

    Args:
        path: File in the format of DeepMimic.
    """

    def __init__(self, path: Path) -> None:
        content = json.loads(path.read_text())
        self.loops: bool = content["Loop"] == "wrap"
        self.frames = np.array(content["Frames"])
        self.times = np.concatenate([[0.0], np.cumsum(self.frames[:-1, 0])])
        self.length = float(self.times[-1])
        # What one cycle adds to the root position; the height stays.
        self.travel = (self.frames[-1, ROOT_POSITION] - self.frames[0, ROOT_POSITION]) * (1, 0, 1)

    def start(self, window: float, generator: np.random.Generator) -> float:
        """Draw the time at which a window begins.

        Args:
            window: Length of the window in seconds.
            generator: Source of the random number.

        Returns:
            Any phase of a motion that loops. Otherwise a time such that the window lies in the clip or, where the clip
            is too short for this, such that no more than its first fifth is lost.
        """
        latest = self.length if self.loops else max(self.length - window, HOLD_SHARE * self.length)
        return generator.uniform(0.0, latest)

    def pose(self, time: float) -> Pose:
        """Compute the pose at a time.

        Args:
            time: Seconds from the start. Past the end, a motion that loops goes on, and others hold their last pose.

        Returns:
            The pose, interpolated between two frames.
        """
        cycle, phase = divmod(time, self.length) if self.loops else (0.0, min(time, self.length))
        index = min(int(np.searchsorted(self.times, phase, side="right")) - 1, len(self.times) - 2)
        fraction = (phase - self.times[index]) / (self.times[index + 1] - self.times[index])
        before, after = self.frames[index], self.frames[index + 1]
        linear = before + fraction * (after - before)

        def rotation(first: int) -> tuple[float, ...]:
            order = [first + 1, first + 2, first + 3, first]
            return pybullet.getQuaternionSlerp(before[order].tolist(), after[order].tolist(), fraction)

        joints = {link: rotation(first) for link, first in SPHERICAL_JOINTS.items()}
        joints |= {link: (float(linear[column]),) for link, column in HINGE_JOINTS.items()}
        return Pose(linear[ROOT_POSITION] + cycle * self.travel, rotation(ROOT_ROTATION.start), joints)


@dataclass
class Subject:
    """What tells one actor from another.

    Attributes:
        colour: Red, green and blue of the body, 0 to 1.
        speed: Scale of the playback speed.
    """

    colour: tuple[float, float, float]
    speed: float


def make_subject(seed: int, number: int) -> Subject:
    """Draw a subject, the same one for all actions, views and repetitions.

    Args:
        seed: Seed of the set.
        number: Number of the subject, from 1.

    Returns:
        The subject.
    """
    generator = np.random.default_rng((seed, 0, 0, number))
    hue, saturation, value = generator.uniform((0.0, 0.5, 0.6), (1.0, 0.9, 1.0))
    return Subject(colorsys.hsv_to_rgb(hue, saturation, value), generator.uniform(0.8, 1.25))


class Stage:
    """The scene: the humanoid on a chequered ground, y up."""

    def __init__(self) -> None:
        pybullet.connect(pybullet.DIRECT)
        pybullet.setAdditionalSearchPath(pybullet_data.getDataPath())
        self.humanoid = pybullet.loadURDF(
            "humanoid/humanoid.urdf",
            globalScaling=0.25,
            useFixedBase=True,
            flags=pybullet.URDF_MAINTAIN_LINK_ORDER,
        )
        lying = pybullet.getQuaternionFromEuler([-math.pi / 2, 0, 0])
        self.ground = pybullet.loadURDF("plane.urdf", [0, 0, 0], lying)

    def paint(self, body: tuple[float, float, float], ground: np.ndarray) -> None:
        """Set the colours.

        Args:
            body: Colour of the body; the head is a lighter one.
            ground: Tint of the ground.
        """
        head = [(1 + channel) / 2 for channel in body]
        for link in range(-1, pybullet.getNumJoints(self.humanoid)):
            colour = head if link == HEAD else body
            pybullet.changeVisualShape(self.humanoid, link, rgbaColor=[*colour, 1])
        pybullet.changeVisualShape(self.ground, -1, rgbaColor=[*ground, 1])

    def place(self, pose: Pose) -> None:
        """Put the humanoid into a pose.

        Args:
            pose: The pose.
        """
        pybullet.resetBasePositionAndOrientation(self.humanoid, pose.position.tolist(), pose.rotation)
        for link, value in pose.joints.items():
            pybullet.resetJointStateMultiDof(self.humanoid, link, value)

    def render(self, eye: np.ndarray, target: np.ndarray, light: np.ndarray, size: int) -> np.ndarray:
        """Take a picture.

        Args:
            eye: Position of the camera.
            target: Point in the middle of the picture.
            light: Direction towards the light.
            size: Height and width in pixels.

        Returns:
            Picture as bytes, height by width by 3.
        """
        large = size * SUPERSAMPLING
        picture = pybullet.getCameraImage(
            large,
            large,
            pybullet.computeViewMatrix(eye.tolist(), target.tolist(), [0, 1, 0]),
            pybullet.computeProjectionMatrixFOV(FIELD_OF_VIEW, 1.0, 0.1, 30.0),
            lightDirection=light.tolist(),
            shadow=0,
            renderer=pybullet.ER_TINY_RENDERER,
        )[2]
        blocks = np.asarray(picture, np.uint8).reshape(size, SUPERSAMPLING, size, SUPERSAMPLING, 4)
        return blocks[..., :3].mean((1, 3)).round().astype(np.uint8)


def camera_targets(positions: np.ndarray) -> np.ndarray:
    """Follow the root smoothly.

    Args:
        positions: Root positions of the window, frames by 3.

    Returns:
        Points to look at: horizontally the straight line that fits the path best, so its mean is the mean position, at
        the mean height.
    """
    steps = np.arange(len(positions)) - (len(positions) - 1) / 2
    slope = steps @ positions / max(steps @ steps, 1.0) * (1, 0, 1)
    return positions.mean(0) + steps[:, None] * slope


def render_clip(
    stage: Stage,
    motion: Motion,
    subject: Subject,
    view: int,
    generator: np.random.Generator,
    size: int,
    frames: int,
    fps: int,
) -> np.ndarray:
    """Render one clip.

    Args:
        stage: The scene.
        motion: What the actor does.
        subject: Who does it.
        view: Number of the view, from 1.
        generator: Source of all random numbers of the clip.
        size: Height and width in pixels.
        frames: Number of frames.
        fps: Frames in a second.

    Returns:
        Clip as bytes, frames by height by width by 3.
    """
    yaw = math.radians(VIEW_CENTRES[view - 1] + generator.uniform(-VIEW_WIDTH / 2, VIEW_WIDTH / 2))
    pitch = math.radians(generator.uniform(-25.0, -10.0))
    distance = generator.uniform(3.0, 4.0)
    ground = generator.uniform(0.4, 1.0, 3)
    light_yaw, light_height = generator.uniform((0.0, 0.5), (2 * math.pi, 2.0))
    start = motion.start(frames / fps * subject.speed, generator)

    # At the start of a clip the actor faces along x, with its right hand along z.
    offset = distance * np.array([math.cos(pitch) * math.cos(yaw), -math.sin(pitch), math.cos(pitch) * math.sin(yaw)])
    light = np.array([math.cos(light_yaw), light_height, math.sin(light_yaw)])
    poses = [motion.pose(start + frame / fps * subject.speed) for frame in range(frames)]
    targets = camera_targets(np.stack([pose.position for pose in poses]))
    stage.paint(subject.colour, ground)
    pictures = []
    for pose, target in zip(poses, targets, strict=True):
        stage.place(pose)
        pictures.append(stage.render(target + offset, target, light, size))
    return np.stack(pictures)


def write_video(path: Path, pictures: np.ndarray, fps: int) -> None:
    """Write an MP4 file, whole or not at all.

    Args:
        path: File to write.
        pictures: Clip as bytes, frames by height by width by 3.
        fps: Frames in a second.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with av.open(str(temporary), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": "18", "threads": "1"})
        stream.height, stream.width = pictures.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    temporary.replace(path)


def parse_arguments() -> argparse.Namespace:
    """Read the command line.

    Returns:
        The options.
    """
    parser = argparse.ArgumentParser(description="Make a video set from the motion-capture clips of pybullet.")
    parser.add_argument("--output", type=Path, required=True, help="folder of the set")
    parser.add_argument("--clips-per-view", type=int, default=20, help="clips per action and view")
    parser.add_argument("--size", type=int, default=112, help="height and width in pixels, even")
    parser.add_argument("--frames", type=int, default=24, help="frames of a clip")
    parser.add_argument("--fps", type=int, default=12, help="frames in a second")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
    options = parser.parse_args()
    if options.size % 2:
        parser.error("--size must be even")
    return options


def main() -> None:
    """Make the set."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    options = parse_arguments()
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "classes.txt").write_text("".join(f"{name}\n" for name in ACTIONS))
    stage = Stage()
    motions = Path(pybullet_data.getDataPath()) / "data" / "motions"
    for action, name in enumerate(ACTIONS, start=1):
        motion = Motion(motions / f"humanoid3d_{name}.txt")
        for view in range(1, len(VIEW_CENTRES) + 1):
            for repetition in range(options.clips_per_view):
                number = repetition % SUBJECTS + 1
                path = options.output / f"a{action:02}" / f"v{view:02}_s{number:02}_e{repetition:02}.mp4"
                if path.exists():
                    continue
                generator = np.random.default_rng((options.seed, action, view, repetition))
                subject = make_subject(options.seed, number)
                pictures = render_clip(
                    stage, motion, subject, view, generator, options.size, options.frames, options.fps
                )
                write_video(path, pictures, options.fps)
        LOGGER.info("%s done", name)


if __name__ == "__main__":
    main()
