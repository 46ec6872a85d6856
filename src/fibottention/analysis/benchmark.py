"""Timing sparse attention against its rivals, all in one process and in turn, so that ratios can be trusted."""

import contextlib
import dataclasses
import functools
import platform
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fibottention.analysis.timing import peak_mib, seconds_of
from fibottention.ops import explain_backend, sparse_attention
from fibottention.ops.attention import Backend
from fibottention.ops.constants import pattern_mask
from fibottention.patterns import Pattern, wythoff

__all__ = [
    "RIVALS",
    "TRAINING_CASES",
    "Case",
    "Measurement",
    "TrainingCase",
    "attention_markdown",
    "default_batch",
    "flex_block_mask",
    "machine",
    "measure_attention",
    "measure_training",
    "plot_attention",
    "training_markdown",
]

NUM_HEADS, HEAD_DIM = 12, 64

RIVALS = (
    "dense SDPA",
    "cpu",
    "cpu, timm views",
    "triton",
    "triton, timm views",
    "gather",
    "SDPA, boolean mask",
    "SDPA, float mask",
    "released code",
    "FlexAttention",
)

# Numbers in the largest dense intermediate above which a dense rival is left out (8 GiB in float32).
_LARGEST_SQUARE = 2**31


@dataclasses.dataclass(frozen=True)
class Case:
    """One setting: the Wythoff pattern with a CLS token, 12 heads of 64.

    Attributes:
        tokens: Length of the sequence, the CLS token included.
        batch: Number of sequences.
        dtype: Dtype of q, k and v.
        threads: Threads on the CPU.
        backward: Time the backward pass too.
        device: Device.
    """

    tokens: int
    batch: int
    dtype: torch.dtype = torch.float32
    threads: int = 1
    backward: bool = False
    device: str = "cpu"

    @property
    def pattern(self) -> Pattern:
        """The pattern: Fibonacci diagonals of the Wythoff array, ``w_max`` a third of the tokens."""
        return wythoff(NUM_HEADS, self.tokens - 1, prefix_tokens=1)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One rival in one setting.

    Attributes:
        rival: Its name.
        milliseconds: Median time, or None if it could not run.
        peak_mib: Memory above what was there before, or None if not measured.
        note: Why it could not run.
        gflops: Rate on the pairs that count for it: the kept ones, or all of them for a dense rival.
    """

    rival: str
    milliseconds: float | None
    peak_mib: float | None = None
    note: str = ""
    gflops: float | None = None


def default_batch(tokens: int) -> int:
    """As many sequences as make about 3,000 tokens, at least one."""
    return max(1, 3152 // tokens)


def machine(device: str = "cpu") -> str:
    """The machine and the software, in words."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{_processor()}, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def flex_block_mask(pattern: Pattern, device: str) -> Any:
    """FlexAttention's block mask of an offset pattern, built from the offsets and not by trying all pairs."""
    from torch.nn.attention.flex_attention import BlockMask

    assert pattern.offsets is not None
    block, length, prefix = 128, pattern.sequence_length, pattern.prefix_tokens
    blocks = -(-length // block)
    kept = np.zeros((len(pattern.offsets), blocks, blocks), dtype=bool)
    table = torch.zeros(len(pattern.offsets), 2 * length, dtype=torch.bool)
    row = np.arange(blocks)
    for head, offsets in enumerate(pattern.offsets):
        for offset in offsets:
            for edge in (0, block - 1):
                column = (row * block + edge + offset) // block
                inside = (column >= 0) & (column < blocks)
                kept[head, row[inside], column[inside]] = True
            table[head, offset + length] = True
    if prefix:
        kept[:, 0, :] = kept[:, :, 0] = True
    counts = torch.from_numpy(kept.sum(-1)).int()
    order = torch.from_numpy(np.argsort(~kept, axis=-1, kind="stable").copy()).int()
    table = table.to(device)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q < prefix) | (kv < prefix) | table[h, kv - q + length]

    return BlockMask.from_kv_blocks(
        counts[None].to(device),
        order[None].to(device),
        BLOCK_SIZE=block,
        mask_mod=mask_mod,
        seq_lengths=(length, length),
    )


def _rivals(case: Case) -> dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], bool, bool]]:
    """By name: the function, whether it computes all pairs, and whether it makes a tensor of all pairs."""
    pattern = case.pattern

    def by_backend(backend: Backend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return lambda q, k, v: sparse_attention(q, k, v, pattern, backend=backend)

    def float_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=additive())

    def released(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT) * HEAD_DIM**-0.5 * pattern_mask(pattern, q.device)
        return scores.softmax(-1) @ v

    @functools.cache
    def additive() -> Tensor:
        kept = pattern_mask(pattern, torch.device(case.device))
        return torch.zeros(kept.shape, dtype=case.dtype, device=case.device).masked_fill(~kept, float("-inf"))

    ours: Backend = "triton" if case.device == "cuda" else "cpu"
    rivals = {
        "dense SDPA": (F.scaled_dot_product_attention, True, False),
        ours: (by_backend(ours), False, False),
        f"{ours}, timm views": (by_backend(ours), False, False),
        "gather": (by_backend("gather"), False, False),
        "SDPA, boolean mask": (by_backend("sdpa"), True, True),
        "SDPA, float mask": (float_mask, True, True),
        "released code": (released, True, True),
    }
    if case.device == "cuda" or not case.backward:
        rivals["FlexAttention"] = (_flex(pattern, case.device), False, False)
    return rivals


def _flex(pattern: Pattern, device: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    made: list[Any] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not made:
            # A fresh start for each setting: torch.compile gives up on a function that it has compiled too often.
            torch._dynamo.reset()
            made.extend((torch.compile(flex_attention, dynamic=False), flex_block_mask(pattern, device)))
        return made[0](q, k, v, block_mask=made[1])

    return attend


def _call(case: Case, function: Callable[[Tensor, Tensor, Tensor], Tensor], views: bool) -> Callable[[], object]:
    generator = torch.Generator(case.device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=case.device).to(case.dtype)

    if views:
        qkv = draw(case.batch, case.tokens, 3, NUM_HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        q, k, v = (t.detach().requires_grad_(case.backward) for t in qkv.unbind(0))
    else:
        shape = (case.batch, NUM_HEADS, case.tokens, HEAD_DIM)
        q, k, v = (draw(*shape).requires_grad_(case.backward) for _ in range(3))
    if not case.backward:

        def forward() -> object:
            with torch.no_grad():
                return function(q, k, v)

        return forward
    grad = draw(case.batch, NUM_HEADS, case.tokens, HEAD_DIM)
    return lambda: torch.autograd.grad(function(q, k, v), (q, k, v), grad)


def _stream(case: Case) -> Callable[[], object]:
    """Reads three tensors of the size of q once and writes a fourth: no attention can be faster."""
    shape = (case.batch, NUM_HEADS, case.tokens, HEAD_DIM)
    a, b, c, out = (torch.rand(shape, device=case.device).to(case.dtype) for _ in range(4))
    return lambda: torch.addcmul(a, b, c, out=out)


@contextlib.contextmanager
def _threads(case: Case) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(case.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_attention(
    case: Case, *, seconds: float = 4.0, without: tuple[str, ...] = (), progress: Callable[[str], None] = lambda _: None
) -> list[Measurement]:
    """Time every rival in one setting, in turn; medians.

    A rival that fails is noted and does not stop the others.

    Args:
        case: The setting.
        seconds: Time for each rival; quick ones run at most 50 times, slow ones three times in up to three times this.
        without: Names of rivals to leave out.
        progress: Called with the name of a rival before its first run.
    """
    # The allocator gives memory back to the system until a large block has been freed once, as in any training.
    torch.empty(2**23 - 2**12)
    square = case.batch * NUM_HEADS * case.tokens**2
    with _threads(case):
        calls: dict[str, Callable[[], object]] = {"stream": _stream(case)}
        failed: dict[str, str] = {}
        memory: dict[str, float | None] = {}
        dense: dict[str, bool] = {}
        for name, (function, all_pairs, makes_square) in _rivals(case).items():
            if name in without:
                continue
            dense[name] = all_pairs
            if makes_square and square > _LARGEST_SQUARE:
                failed[name] = "would need too much memory"
                continue
            progress(name)
            try:
                call = _call(case, function, views="views" in name)
                call()
                memory[name] = peak_mib(call, case.device)
                calls[name] = call
            except Exception as error:
                failed[name] = (str(error).strip() or repr(error)).splitlines()[0][:120]
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(50):
            for name, call in calls.items():
                spent = sum(times[name])
                if spent < seconds or (len(times[name]) < 3 and spent < 3 * seconds):
                    times[name].append(seconds_of(call, case.device))
    passes = 3 if case.backward else 1
    kept = case.batch * case.pattern.nnz
    results = []
    for name, values in times.items():
        middle = statistics.median(values)
        gflops = None
        if name != "stream":
            gflops = passes * 4 * HEAD_DIM * (square if dense[name] else kept) / middle / 1e9
        results.append(Measurement(name, 1000 * middle, memory.get(name), gflops=gflops))
    return results + [Measurement(name, None, note=note) for name, note in failed.items()]


def attention_markdown(results: dict[Case, list[Measurement]], command: str) -> str:
    """One table of all settings and rivals."""
    device = next(iter(results)).device
    lines = [
        "# Sparse attention against its rivals",
        "",
        f"`{command}`; {machine(device)}.",
        "",
        "Wythoff pattern with one CLS token, 12 heads of 64, `w_max` a third of the tokens. Medians of interleaved",
        "runs. `stream` is `torch.addcmul(q, k, v, out=o)`, which reads and writes as much as attention must; `over",
        "stream` is the time in units of that. GF/s count the kept pairs, or all pairs for a rival that computes them",
        "all; `of dense` is that rate as a share of dense SDPA's. Memory is the peak above what was in use before.",
        "",
        "| tokens | batch | density | dtype | threads | pass | rival | ms | over dense SDPA | over stream | GF/s "
        "| of dense | peak MiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, measurements in results.items():
        by_name = {m.rival: m for m in measurements}
        dense, stream = by_name.get("dense SDPA"), by_name["stream"]
        for m in measurements:
            place = (
                f"| {case.tokens:,} | {case.batch} | {case.pattern.density():.2%} | {str(case.dtype)[6:]} | "
                f"{case.threads if device == 'cpu' else '-'} | {'both' if case.backward else 'forward'} | {m.rival} | "
            )
            if m.milliseconds is None:
                lines.append(f"{place}{m.note} | | | | | |")
                continue
            assert stream.milliseconds is not None
            speed_up = ""
            if dense and dense.milliseconds and m.rival != "stream":
                speed_up = f"{dense.milliseconds / m.milliseconds:.2f}x"
            share = f"{m.gflops / dense.gflops:.0%}" if dense and dense.gflops and m.gflops else ""
            rate = f"{m.gflops:.1f}" if m.gflops else ""
            peak = "" if m.peak_mib is None else f"{m.peak_mib:,.0f}"
            over_stream = m.milliseconds / stream.milliseconds
            lines.append(f"{place}{m.milliseconds:.3g} | {speed_up} | {over_stream:.1f} | {rate} | {share} | {peak} |")
    return "\n".join(lines) + "\n"


def plot_attention(results: dict[Case, list[Measurement]], path: Path) -> None:
    """Draw time against tokens, forward and both passes, for the first dtype and the most threads."""
    from matplotlib.figure import Figure

    first = next(iter(results))
    threads = max(case.threads for case in results)
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, backward in zip(axes, (False, True), strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for case, measurements in results.items():
            if (case.dtype, case.threads, case.backward) != (first.dtype, threads, backward):
                continue
            for m in measurements:
                if m.milliseconds is not None and m.rival != "stream":
                    lines.setdefault(m.rival, []).append((case.tokens, m.milliseconds / case.batch))
        for name, points in lines.items():
            ours = name in ("cpu", "triton")
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=name, linewidth=3 if ours else 1.3)
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="tokens",
            title="forward and backward" if backward else "forward",
        )
        ticks = sorted({case.tokens for case in results})
        axis.set_xticks(ticks, [f"{t:,}" for t in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("milliseconds per sequence")
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend(fontsize=8)
    figure.suptitle(f"12 heads of 64, {str(first.dtype)[6:]}, {machine(first.device)}", fontsize=9)
    figure.savefig(path, dpi=130, format="png")


@dataclasses.dataclass(frozen=True)
class TrainingCase:
    """A training step of ViT-S/16 at one image size."""

    what: str
    image_size: int
    batch: int


TRAINING_CASES = (
    TrainingCase("224 pixels", 224, 8),
    TrainingCase("512 pixels", 512, 2),
    TrainingCase("16 frames of 224 pixels as one sequence", 896, 1),
    TrainingCase("1,024 pixels", 1024, 1),
)


def measure_training(
    case: TrainingCase, device: str = "cpu", runs: int = 3, progress: Callable[[str], None] = lambda _: None
) -> dict[str, float]:
    """Median milliseconds of a whole training step of ViT-S/16: dense, and with Fibottention."""
    import timm

    from fibottention.adapters.timm import sparsify
    from fibottention.specs import Fibottention

    steps: dict[str, Callable[[], None]] = {}
    for name in ("dense", "fibottention"):
        progress(name)
        model = timm.create_model("vit_small_patch16_224", img_size=case.image_size, num_classes=10).to(device)
        if name == "fibottention":
            sparsify(model, Fibottention())
        steps[name] = _training_step(model, case, device)
        steps[name]()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(runs):
        for name, step in steps.items():
            times[name].append(seconds_of(step, device))
    return {name: 1000 * statistics.median(values) for name, values in times.items()}


def _training_step(model: torch.nn.Module, case: TrainingCase, device: str) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters())
    images = torch.rand(case.batch, 3, case.image_size, case.image_size, device=device)
    labels = torch.zeros(case.batch, dtype=torch.long, device=device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def training_markdown(results: dict[TrainingCase, dict[str, float]], command: str, device: str = "cpu") -> str:
    """The table of training steps."""
    lines = [
        "# A whole training step of ViT-S/16",
        "",
        f"`{command}`; {machine(device)}.",
        "",
        "Forward, backward and AdamW, float32, random images; dense is timm's model as it is.",
        "",
        "| input | tokens | batch | dense, ms | Fibottention, ms | speed-up | backend |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, ms in results.items():
        tokens = (case.image_size // 16) ** 2
        q = torch.empty(case.batch, 6, tokens + 1, 64, device="cuda" if device == "cuda" else "cpu")
        backend = explain_backend(q, wythoff(6, tokens, prefix_tokens=1)).backend
        lines.append(
            f"| {case.what} | {tokens + 1:,} | {case.batch} | {ms['dense']:,.0f} | {ms['fibottention']:,.0f} | "
            f"{ms['dense'] / ms['fibottention']:.2f}x | {backend} |"
        )
    return "\n".join(lines) + "\n"
