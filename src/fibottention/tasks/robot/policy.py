"""Receding-horizon control: look, plan a sequence of actions, do some of them, look again."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fibottention.errors import UserError
from fibottention.tasks.robot.network import DiffusionPolicy
from fibottention.tasks.robot.windows import crop_images

__all__ = ["Policy"]

_LATENCIES = 1000  # of which the times are kept


class Policy:
    """A trained policy that a robot's loop asks for one action after the other.

    It keeps the last observations and the actions that are still to be done, nothing else.

    >>> policy = Policy.from_run("runs/pusht", sampler="ddim", steps=16)
    >>> policy.reset(seed=0)
    >>> action = policy.act({"image": image, "agent_pos": position})

    Args:
        network: The trained network.
        sampler: ``"ddpm"`` or ``"ddim"``; as in training if None.
        steps: Diffusion steps of a plan; as in training if None. DDIM does with few.
        device: Where to compute.
    """

    def __init__(
        self,
        network: DiffusionPolicy,
        *,
        sampler: str | None = None,
        steps: int | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        most = network.diffusion.train_steps
        if sampler not in (None, "ddpm", "ddim"):
            raise UserError(f"sampler must be ddpm or ddim, got {sampler!r}")
        if steps is not None and not 1 <= steps <= most:
            raise UserError(f"steps must be in 1 .. {most}, the diffusion steps of training, got {steps}")
        network.normalizer.check()
        self.network = network.eval().to(device)
        self.sampler, self.steps, self.device = sampler, steps, torch.device(device)
        self.latencies: deque[float] = deque(maxlen=_LATENCIES)
        self.reset()

    @classmethod
    def from_run(cls, run: str | Path, **options: Any) -> "Policy":
        """The policy of a run's best epoch, or of a checkpoint in its folder.

        Args:
            run: Folder of a run of the robot task.
            **options: Those of the class.

        Raises:
            UserError: If there is no such run.
        """
        from fibottention.tasks.runs import load_model

        model = load_model(run)[0]
        if not isinstance(model, DiffusionPolicy):
            raise UserError(f"{run} is not a run of the robot task")
        return cls(model, **options)

    def reset(self, seed: int = 0) -> None:
        """Forget everything before a new episode.

        Args:
            seed: Seed of the noise that plans start from.
        """
        self._seen: deque[dict[str, NDArray[Any]]] = deque(maxlen=self.network.observation_steps)
        self._planned: deque[NDArray[np.float32]] = deque()
        self._generator = torch.Generator().manual_seed(seed)

    def act(self, observation: Mapping[str, Any]) -> NDArray[np.float32]:
        """The next action.

        Args:
            observation: Images ``(H, W, 3)`` of uint8 and vectors, by name.

        Returns:
            ``(action_dim,)``.

        Raises:
            UserError: If the observation lacks something, or something has another shape.
        """
        self._seen.append(self._checked(observation))
        while len(self._seen) < self.network.observation_steps:
            self._seen.append(self._seen[-1])
        if not self._planned:
            window = {name: np.stack([o[name] for o in self._seen])[None] for name in self._seen[0]}
            self._planned.extend(self.plan(window, [self._generator])[0])
        return self._planned.popleft()

    def plan(
        self, observations: Mapping[str, NDArray[Any]], generators: Sequence[torch.Generator]
    ) -> NDArray[np.float32]:
        """Actions to be done after some observations, for several robots at once.

        Args:
            observations: Images ``(B, observation_steps, H, W, 3)`` and vectors ``(B, observation_steps, n)``, by name.
            generators: Sources of the noise, one per robot.

        Returns:
            ``(B, action_steps, action_dim)``.
        """
        start = time.perf_counter()
        tensors = {}
        for name, values in observations.items():
            if name in self.network.shapes.cameras:
                values = crop_images(values, self.network.crop, None).transpose(0, 1, 4, 2, 3)
            tensors[name] = torch.from_numpy(np.ascontiguousarray(values)).to(self.device)
        actions = self.network.predict(tensors, generators, sampler=self.sampler, steps=self.steps)
        first = self.network.observation_steps - 1
        chosen = actions[:, first : first + self.network.action_steps].float().cpu().numpy()
        self.latencies.append(time.perf_counter() - start)
        return chosen

    def latency(self) -> float:
        """Median time of a plan in seconds, of the last 1,000."""
        return float(np.median(self.latencies)) if self.latencies else float("nan")

    def _checked(self, observation: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        shapes = self.network.shapes
        checked = {}
        for name, size in (*shapes.cameras.items(), *((n, (s,)) for n, s in shapes.states.items())):
            if name not in observation:
                raise UserError(
                    f"the observation lacks {name!r}; it has {', '.join(map(str, observation)) or 'nothing'}"
                )
            is_camera = name in shapes.cameras
            values = np.asarray(observation[name], dtype=None if is_camera else np.float32)
            wanted = (*size, 3) if is_camera else size
            if values.shape != wanted or (is_camera and values.dtype != np.uint8):
                raise UserError(
                    f"{name} must have shape {wanted}{' and dtype uint8' if is_camera else ''}, got {values.shape} of "
                    f"{values.dtype}"
                )
            if not is_camera and not np.isfinite(values).all():
                raise UserError(f"{name} is not finite: {values.tolist()}")
            checked[name] = values.copy()
        return checked
