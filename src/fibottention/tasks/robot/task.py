"""Robot learning: a diffusion policy trained on demonstrations, tried in a simulator."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object
from PIL import Image
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from fibottention.analysis.cost import forward_macs
from fibottention.tasks.base import RunTask
from fibottention.tasks.robot.config import RobotConfig
from fibottention.tasks.robot.data import RobotData
from fibottention.tasks.robot.environments import make_environment
from fibottention.tasks.robot.network import build_policy
from fibottention.tasks.robot.policy import Policy
from fibottention.tasks.robot.rollout import LearnedPlanner, Rollout, roll_out, summarize
from fibottention.tasks.robot.shapes import PolicyShapes
from fibottention.tasks.weights import load_into
from fibottention.training.engine import Evaluation
from fibottention.training.run import Run, load_weights

__all__ = ["RobotTask"]

_SAMPLES = 6
_VALIDATION_SEED = 1


class RobotTask(RunTask):
    """A diffusion policy for the `Trainer`.

    Args:
        config: All options.
    """

    sample_name = "windows"
    is_stream = False

    def __init__(self, config: RobotConfig) -> None:
        config.check()
        self.config = config
        if config.rollout.environment is not None:
            make_environment(config.rollout.environment).close()  # what it lacks is said before the training
        # A bar is for those who look at it; what is written to a file has lines only.
        # One process unpacks, the others then find it done.
        with (
            PartialState().main_process_first(),
            Progress(transient=True, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress,
        ):
            bar = progress.add_task("unpacking demonstrations", total=None)
            self.data = RobotData(config, lambda done, total: progress.update(bar, completed=done, total=total))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.train.seed)
            self.model, self.sparsify_report = build_policy(config, self.data.shapes)
        self.data.fit(self.model.normalizer)
        if config.model.checkpoint is not None:
            weights = load_weights(Path(config.model.checkpoint))
            if config.train.epochs:  # the statistics are those of the data that are trained on
                weights |= {f"normalizer.{name}": value for name, value in self.model.normalizer.state_dict().items()}
            load_into(self.model, weights, config.model.checkpoint)
        self.train_loader, self.val_loader = self.data.train_loader, self.data.val_loader
        self.epoch = 0

    @classmethod
    def restore_model(cls, config: RobotConfig, saved: dict[str, Any]) -> nn.Module:
        """See `RunTask`."""
        return build_policy(config, PolicyShapes.from_dict(saved["shapes"]))[0]

    def overview(self) -> str:
        """See `RunTask`."""
        data = self.data
        return f"{len(data.train_episodes)} episodes, {len(data.train_dataset)} windows"

    def summary(self) -> dict[str, Any]:
        """See `RunTask`."""
        return {"environment_name": self.config.rollout.environment, "train_episodes": len(self.data.train_episodes)}

    def macs(self) -> int:
        """Of one plan: the encoders once, the U-Net in each diffusion step."""
        sample = {name: values[None] for name, values in self.data.val_dataset[0].items()}
        generator = torch.Generator().manual_seed(0)

        def plan(steps: int) -> int:
            options: Any = {"sampler": "ddim", "steps": steps}
            return forward_macs(self.model, lambda model: model.predict(sample, [generator], **options))

        one, two = plan(1), plan(2)
        return one + (self.config.diffusion.inference_steps - 1) * (two - one)

    def set_epoch(self, epoch: int) -> None:
        """See `Task`."""
        self.epoch = epoch
        self.data.set_epoch(epoch)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """See `Task`."""
        noise, reconstruction = model(batch)
        return noise + self.config.diffusion.reconstruction_weight * reconstruction

    def batch_length(self, batch: dict[str, Tensor]) -> int:
        """See `Task`."""
        return len(batch["action"])

    def score(self, metrics: dict[str, float]) -> float | None:
        """The mean score of the rollouts; without an environment, the loss on the validation episodes."""
        if self.config.rollout.environment is None:
            return -metrics["val_loss"]
        return metrics.get("test_mean_score")

    def unreadable(self) -> list[str]:
        """See `Task`; what cannot be read is named before the training."""
        return []

    def evaluate(self, model: nn.Module, batches: Iterator[dict[str, Tensor]], accelerator: Accelerator) -> Evaluation:
        """Loss on the validation episodes and, every so many epochs, rollouts."""
        losses = []
        devices = [accelerator.device] if accelerator.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(_VALIDATION_SEED)
            for batch in batches:
                loss = model(batch)[0].repeat(len(batch["action"]))
                losses.append(accelerator.gather_for_metrics(loss))
        all_losses = torch.cat(losses)
        metrics = {"val_loss": float(all_losses.mean())}
        details: dict[str, Any] = {"shapes": self.data.shapes.to_dict(), "windows": len(all_losses)}
        rollout = self.config.rollout
        is_due = (self.epoch + 1) % rollout.every == 0 or self.epoch + 1 >= self.config.train.epochs
        if rollout.environment is not None and is_due:
            rollouts = self._roll_out(model, accelerator)
            summary = summarize(rollouts)
            metrics |= {"test_mean_score": summary.mean_score, "success": 100 * summary.success}
            details |= {
                "episodes": summary.episodes,
                "interval": [100 * bound for bound in summary.interval],
                "rollouts": [rollout.to_dict() for rollout in rollouts],
            }
        return Evaluation(metrics, details)

    def _roll_out(self, model: Any, accelerator: Accelerator) -> list[Rollout]:
        rollout = self.config.rollout
        assert rollout.environment is not None
        seeds = list(range(rollout.first_seed, rollout.first_seed + rollout.episodes))
        own = seeds[accelerator.process_index :: accelerator.num_processes]
        rollouts = []
        if own:
            rollouts = roll_out(
                rollout.environment,
                LearnedPlanner(Policy(model, device=accelerator.device)),
                own,
                observation_steps=self.config.data.observation_steps,
                parallel=rollout.parallel,
                max_steps=rollout.max_steps,
            )
        return sorted(gather_object(rollouts), key=lambda one: one.seed)

    def save_samples(self, run: Run) -> None:
        """See `RunTask`; pictures of the middle of some episodes."""
        saved = []
        store, camera = self.data.store, next(iter(self.data.shapes.cameras))
        for place, episode in enumerate(self.data.train_episodes[:_SAMPLES]):
            step = int(store.starts[episode]) + store.lengths[episode] // 2
            file = run.folder / "samples" / f"{place}.png"
            file.parent.mkdir(exist_ok=True)
            Image.fromarray(store.arrays[camera][step]).save(file)
            saved.append({"file": f"samples/{file.name}", "class": store.names[episode]})
        run.write_json("samples.json", saved)
