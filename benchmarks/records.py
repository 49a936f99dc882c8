"""The clipped sum over a batch of records, beside Opacus and JAX: CPU seconds on one thread, or CUDA with `--device`.

niss           `niss.records.clipped_sum`
vmap           `torch.func.vmap` of `grad`, clipped and summed, as in torch's tutorial
opacus         its hooks: a gradient for each record (`GradSampleModule`, `DPOptimizer`)
opacus-ghost   its ghost clipping: norms from hooks, then a second backward pass
jax            `jax.vmap` of `jax.grad`, clipped and summed, compiled

All are given the same batch, already drawn, and the same weights, compute in float32 without TF32, and their sums are
compared with each other. On CUDA the batch is ten times as large. Opacus
and JAX are not dependencies of the package: pip install opacus jax.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import numpy as np
import torch
from harness import Report, command_line, in_turns, seconds
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from niss.learning import ImageSamples, build_model, seeded_torch
from niss.randomness import SimStream
from niss.records import Records, clipped_sum

# Not a multiple of what is computed together: filling up is part of the time.
BATCH, CLIP = 250, 0.1
WIDTH, HEADS, TOKENS, LENGTH = 64, 4, 80, 64
Sum = Callable[[], Tensor]


class Adapted(nn.Module):
    """A linear layer, frozen, with a product of two thin ones beside it (Hu et al. 2021)."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        return self.frozen(values) + self.up(self.down(values))


class Block(nn.Module):
    """Attention and a perceptron, each added to what came in."""

    def __init__(self, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.norm, self.joint, self.out = nn.LayerNorm(WIDTH), linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.second = nn.LayerNorm(WIDTH)
        self.wide, self.back = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        """[N, T, width] to the same."""
        split = self.joint(self.norm(values)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        queries, keys, contents = split[0], split[1], split[2]
        scores = (queries @ keys.mT / queries.shape[-1] ** 0.5).softmax(-1)
        values = values + self.out((scores @ contents).transpose(1, 2).flatten(2))
        return values + self.back(functional.gelu(self.wide(self.second(values)), approximate="tanh"))


class Classifier(nn.Module):
    """Embedded tokens with their places, two blocks, the mean over positions, a linear output."""

    def __init__(self, linear: Callable[[int, int], nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(linear), Block(linear))
        self.output = nn.Linear(WIDTH, 10)
        if linear is Adapted:
            for part in (
                self.tokens,
                self.places,
                *(b.norm for b in self.blocks),
                *(b.second for b in self.blocks),
            ):
                part.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [N, 10] of tokens [N, T]."""
        places = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
        return self.output(self.blocks(self.tokens(tokens) + self.places(places)).mean(1))


def tanh_cnn() -> nn.Module:
    """Of Papernot et al. (2021) for MNIST, 26,010 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip


def of_package(name: str, shape: tuple[int, int, int]) -> nn.Module:
    """A model of the package."""
    return build_model(name, samples=ImageSamples(shape), classes=10, stream=SimStream(1))


@dataclass(frozen=True)
class Case:
    """A model, and the shape of a record's inputs."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def make(self, device: str, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
        """The module and a batch."""
        generator = np.random.default_rng(5)
        with seeded_torch(SimStream(2)):
            module = self.build().to(device)
        if len(self.shape) == 1:
            inputs = torch.from_numpy(generator.integers(TOKENS, size=(batch, *self.shape)))
        else:
            inputs = torch.from_numpy(generator.normal(size=(batch, *self.shape)).astype(np.float32))
        labels = torch.from_numpy(generator.integers(10, size=batch))
        return module, inputs.to(device), labels.to(device)


CASES = {
    "MLP 784-200-200-10": Case(partial(of_package, "mlp", (1, 28, 28)), (1, 28, 28)),
    "tanh CNN": Case(tanh_cnn, (1, 28, 28)),
    "ResNet-14, GroupNorm": Case(partial(of_package, "resnet", (3, 32, 32)), (3, 32, 32)),
    "transformer": Case(Classifier, (LENGTH,)),
    "LoRA": Case(partial(Classifier, Adapted), (LENGTH,)),
}


def with_niss(module: nn.Module, inputs: Tensor, labels: Tensor) -> Sum:
    """Ours."""
    records = Records(module, (inputs, labels))
    weights, rows = records.weights, np.arange(len(labels))
    return lambda: torch.from_numpy(clipped_sum(records, weights, rows, CLIP))


def with_vmap(module: nn.Module, inputs: Tensor, labels: Tensor) -> Sum:
    """torch.func alone."""
    trained = {name: value.detach() for name, value in module.named_parameters() if value.requires_grad}

    def loss(entries: dict[str, Tensor], values: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(module, entries, (values[None],)), label[None])

    def total() -> Tensor:
        gradients = vmap(grad(loss), in_dims=(None, 0, 0))(trained, inputs, labels).values()
        norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
        factors = (CLIP / norms).clamp(max=1.0)
        return torch.cat([torch.tensordot(factors, gradient, dims=1).flatten() for gradient in gradients])

    return total


def with_opacus(module: nn.Module, inputs: Tensor, labels: Tensor) -> Sum:
    """Per-sample hooks, and the clipping of its optimizer."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    watched = GradSampleModule(module, loss_reduction="sum")
    trained = [value for value in watched.parameters() if value.requires_grad]
    optimizer = DPOptimizer(
        torch.optim.SGD(trained, lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        expected_batch_size=None,
        loss_reduction="sum",
    )

    def total() -> Tensor:
        optimizer.zero_grad()
        functional.cross_entropy(watched(inputs), labels, reduction="sum").backward()
        optimizer.clip_and_accumulate()
        return torch.cat([value.summed_grad.flatten() for value in trained])

    return total


def with_opacus_ghost(module: nn.Module, inputs: Tensor, labels: Tensor) -> Sum:
    """Norms from hooks, and a second backward pass for the weighted sum of losses."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping as Watched
    from opacus.optimizers import DPOptimizerFastGradientClipping as Optimizer
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping as Loss

    watched = Watched(module, max_grad_norm=CLIP, use_ghost_clipping=True, loss_reduction="sum")
    trained = [value for value in watched.parameters() if value.requires_grad]
    optimizer = Optimizer(
        torch.optim.SGD(trained, lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        expected_batch_size=None,
        loss_reduction="sum",
    )
    loss = Loss(watched, optimizer, nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum")

    def total() -> Tensor:
        optimizer.zero_grad()
        loss(watched(inputs), labels).backward()
        return torch.cat([value.grad.flatten() for value in trained])

    return total


def with_jax(module: nn.Module, inputs: Tensor, labels: Tensor) -> Sum:
    """A function of the same weights, written in JAX."""
    import jax
    from jax import numpy as jnp

    place = jax.devices("cuda" if inputs.is_cuda else "cpu")[0]
    jax.config.update("jax_default_matmul_precision", "highest")

    def put(value: Tensor) -> Any:
        return jax.device_put(value.detach().cpu().numpy(), place)

    weights = {name: put(value) for name, value in module.named_parameters()}
    trained = {name: weights[name] for name, value in module.named_parameters() if value.requires_grad}
    frozen = {name: value for name, value in weights.items() if name not in trained}
    forward = in_jax(module)

    def loss(own: dict[str, Any], values: Any, label: Any) -> Any:
        return -jax.nn.log_softmax(forward(own | frozen, values))[label]

    @jax.jit
    def summed(own: dict[str, Any], values: Any, wanted: Any) -> Any:
        gradients = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(own, values, wanted)
        squares = sum(jnp.square(part.reshape(len(part), -1)).sum(1) for part in gradients.values())
        factors = jnp.minimum(1.0, CLIP / jnp.sqrt(squares))
        return {name: jnp.tensordot(factors, part, axes=1) for name, part in gradients.items()}

    values, wanted = put(inputs), put(labels)

    def total() -> Tensor:
        found = jax.block_until_ready(summed(trained, values, wanted))
        return torch.cat([torch.from_numpy(np.array(found[name])).flatten() for name in trained])

    return total


def in_jax(module: nn.Module) -> Callable[[dict[str, Any], Any], Any]:
    """The forward pass of one record, layer by layer as the module is built."""
    import jax
    from jax import lax
    from jax import numpy as jnp

    def linear(w: dict[str, Any], name: str, x: Any) -> Any:
        if f"{name}.frozen.weight" in w:
            low = x @ w[f"{name}.down.weight"].T @ w[f"{name}.up.weight"].T
            return linear(w, f"{name}.frozen", x) + low
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(w: dict[str, Any], name: str, x: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        scale = jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
        return centred / scale * w[f"{name}.weight"] + w[f"{name}.bias"]

    def convolve(w: dict[str, Any], name: str, part: nn.Conv2d, x: Any) -> Any:
        found = lax.conv_general_dilated(
            x[None], w[f"{name}.weight"], part.stride, [(side, side) for side in part.padding]
        )[0]
        return found if part.bias is None else found + w[f"{name}.bias"][:, None, None]

    def group_norm(w: dict[str, Any], name: str, part: nn.GroupNorm, x: Any) -> Any:
        grouped = x.reshape(part.num_groups, -1)
        centred = grouped - grouped.mean(1, keepdims=True)
        scaled = centred / jnp.sqrt(jnp.square(centred).mean(1, keepdims=True) + part.eps)
        return scaled.reshape(x.shape) * w[f"{name}.weight"][:, None, None] + w[f"{name}.bias"][:, None, None]

    def layer(w: dict[str, Any], name: str, part: nn.Module, x: Any) -> Any:
        match part:
            case nn.Sequential():
                for number, inner in part.named_children():
                    x = layer(w, f"{name}.{number}".lstrip("."), inner, x)
                return x
            case nn.Conv2d():
                return convolve(w, name, part, x)
            case nn.GroupNorm():
                return group_norm(w, name, part, x)
            case nn.MaxPool2d():
                window, step = (1, *2 * [part.kernel_size]), (1, *2 * [part.stride])
                return lax.reduce_window(x, -jnp.inf, lax.max, window, step, "VALID")
            case nn.Flatten():
                return x.reshape(-1)
            case nn.Linear():
                return linear(w, name, x)
            case nn.Tanh():
                return jnp.tanh(x)
            case nn.ReLU():
                return jax.nn.relu(x)
            case nn.Identity():
                return x
        branch = layer(w, f"{name}.branch", part.branch, x)
        return jax.nn.relu(layer(w, f"{name}.shortcut", part.shortcut, x) + branch)

    def block(w: dict[str, Any], name: str, x: Any) -> Any:
        joint = linear(w, f"{name}.joint", norm(w, f"{name}.norm", x)).reshape(len(x), 3, HEADS, -1)
        queries, keys, contents = jnp.moveaxis(joint, (1, 2), (0, 1))
        scores = jax.nn.softmax(queries @ keys.swapaxes(1, 2) / queries.shape[-1] ** 0.5)
        x = x + linear(w, f"{name}.out", jnp.moveaxis(scores @ contents, 0, 1).reshape(len(x), -1))
        return x + linear(
            w, f"{name}.back", jax.nn.gelu(linear(w, f"{name}.wide", norm(w, f"{name}.second", x)))
        )

    def forward(w: dict[str, Any], x: Any) -> Any:
        if isinstance(module, Classifier):
            x = w["tokens.weight"][x] + w["places.weight"]
            x = block(w, "blocks.1", block(w, "blocks.0", x))
            return linear(w, "output", x.mean(0))
        if isinstance(module, nn.Sequential):
            return layer(w, "", module, x)
        x = layer(w, "layers", module.layers, x)
        if hasattr(module, "output"):
            half = x.shape[1] // 2
            quarters = [
                part.mean((1, 2)) for rows in jnp.split(x, [half], 1) for part in jnp.split(rows, [half], 2)
            ]
            x = linear(w, "output", jnp.concatenate(quarters))
        return x

    return forward


CONTESTANTS = {
    "niss": with_niss,
    "vmap": with_vmap,
    "opacus": with_opacus,
    "opacus-ghost": with_opacus_ghost,
    "jax": with_jax,
}


def measure(case: Case, names: list[str], device: str, options: Any) -> dict[str, Any]:
    """Seconds of niss, and of the others as multiples of it in the same turn."""
    sums: dict[str, Sum] = {}
    batch = 8 if options.quick else BATCH if device == "cpu" else 10 * BATCH
    for name in names:
        needs = {"opacus": "opacus", "opacus-ghost": "opacus", "jax": "jax"}.get(name)
        if needs and not find_spec(needs):
            continue
        sums[name] = CONTESTANTS[name](*case.make(device, batch))
    expected = sums["niss"]()
    for name, total in sums.items():
        error = float((total().cpu() - expected).norm() / expected.norm())
        if error > 1e-3:
            raise SystemExit(f"{name} is off by {error:.1e}")

    def timed(total: Sum) -> float:
        def work() -> None:
            total()
            if device != "cpu":
                torch.cuda.synchronize()

        work()  # whoever comes after JAX would else pay for what its threads still do, and for its memory
        return seconds(work) if device == "cpu" else seconds(work, time.perf_counter)

    found = in_turns({name: partial(timed, total) for name, total in sums.items()}, options.repeats)
    ratios = {
        name: median(a / b for a, b in zip(found[name], found["niss"], strict=True))
        if name in found
        else None
        for name in names
        if name != "niss"
    }
    return {"batch": batch, "niss, ms": 1e3 * median(found["niss"])} | ratios


def main() -> None:
    """Measure, print, write."""
    devices = {"choices": ("cpu", "cuda"), "default": "cpu", "help": "where gradients are computed"}
    options = command_line(__doc__, only=tuple(CONTESTANTS), device=devices)
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    report = Report(options, "torch", "opacus", "jax")
    names = list(dict.fromkeys(["niss", *options.only]))
    for name, case in CASES.items():
        title = f"{options.device}: times the time of niss (above 1: slower than niss)"
        report.add(title, [{"model": name} | measure(case, names, options.device, options)])


if __name__ == "__main__":
    main()
