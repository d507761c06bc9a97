"""Exact mode: pin what can be pinned for the life of a run, and refuse what torch cannot repeat.

Note [each thread pins itself]: torch.set_num_threads tells OpenMP and MKL for the calling thread only. A
Python thread started later takes over OpenMP's count, but MKL there goes back to all cores, so a matrix
product has other bits. Inductor's settings belong to a thread too. So `pin` is entered on the very thread
that computes; ranks that are threads of one process enter it each for itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, final

import torch
import torch.utils.deterministic

from samestep.errors import ConfigError, NotReproducible
from samestep.numerics.catalogue import hint_for

CUBLAS_WORKSPACES = (":4096:8", ":16:8")  # those with which cuBLAS repeats itself

# Variables that choose kernels, and so are part of the numbers where they are set.
KERNEL_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "MKL_DYNAMIC",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
INDUCTOR_SETTINGS = (
    "max_autotune",
    "freezing",
    "fallback_random",
    "emulate_precision_casts",
    "use_fast_math",
)

_REFUSAL = re.compile(r"(\w+) does not have a deterministic implementation")
_CUBLAS_REFUSAL = "not deterministic because it uses CuBLAS"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pinned:
    """What `pin` holds fast while its block lasts."""

    threads: int
    device: torch.device


@contextmanager
def pin(*, threads: int, device: torch.device, cublas_workspace: str | None = None) -> Iterator[Pinned]:
    """Pin the kernels for the life of the block, and turn torch's refusals into NotReproducible.

    Law: inside, an operation gives the same bits each time for the same inputs, or is refused. Afterwards
    all switches are as before, whatever passed through; blocks may overlap on several threads.
    `cublas_workspace` is the value of CUBLAS_WORKSPACE_CONFIG, and matters on CUDA only.
    The precision of float32 products (TF32) stays as the user set it; `numerics_key` records it.
    Raises ConfigError for a setting with which no promise could be kept.
    """
    if threads < 1:
        raise ConfigError(f"threads is {threads}. Set it to 1 or more: the CPU threads of one rank.")
    if device.type == "cuda" and cublas_workspace not in CUBLAS_WORKSPACES:
        raise ConfigError(
            f"CUBLAS_WORKSPACE_CONFIG is {cublas_workspace!r}, and with it cuBLAS does not repeat its bits. "
            f"Set it to {CUBLAS_WORKSPACES[0]} in the environment before the process starts."
        )
    # Here, since it takes seconds. It costs a run nothing: the first optimizer imports it too.
    import torch._inductor.config as inductor

    before, inductor_before = torch.get_num_threads(), bool(inductor.deterministic)
    # A kernel that reads memory it never wrote has other bits each time (linalg.lstsq does, see the
    # catalogue). Filling pins it, and cost 0 to 5 % of a step on CPU. On CUDA each fill is one more launch.
    _SWITCHES.take(fill=device.type == "cpu")
    try:
        inductor.deterministic = True
        torch.set_num_threads(threads)
        yield Pinned(threads=threads, device=device)
    except RuntimeError as error:
        refusal = explain(error)
        if refusal is None:
            raise
        raise refusal from error
    finally:
        torch.set_num_threads(before)
        _SWITCHES.give_back()
        inductor.deterministic = inductor_before


def explain(error: RuntimeError) -> NotReproducible | None:
    """Translate torch's refusal of an operation, with what to do; None for every other error."""
    text = str(error)
    if _CUBLAS_REFUSAL in text:
        return NotReproducible(
            "cuBLAS does not repeat its bits as it is set up. "
            f"Set CUBLAS_WORKSPACE_CONFIG={CUBLAS_WORKSPACES[0]} in the environment before the start."
        )
    found = _REFUSAL.search(text)
    if found is None:
        return None
    return NotReproducible(
        f"{found[1]}: torch has no kernel for it on this device that gives the same bits each time, "
        f"so exact mode refuses it. {hint_for(found[1])}"
    )


def numerics_key(
    pinned: Pinned,
    *,
    environment: Mapping[str, str] | None = None,
    settings: Mapping[str, str | int] | None = None,
) -> dict[str, str | int]:
    """Return all that the bits of a run depend on, beside its data and settings; stored with the run.

    Law: two runs of one recipe with equal keys have equal bits. Called inside the block of `pin`, on the
    thread that computes. Of `environment` only KERNEL_VARIABLES are taken; `settings` are added as they
    are, for what the caller knows to be part of the numbers (micro-batch, precision).
    """
    import torch._inductor.config as inductor

    cuda = pinned.device.type == "cuda"
    build = torch.__config__.show()
    key: dict[str, str | int] = {
        "torch": str(torch.__version__),
        "torch_commit": str(torch.version.git_version)[:12],
        "device": pinned.device.type,
        "device_name": torch.cuda.get_device_name(pinned.device) if cuda else _processor(),
        "cpu_capability": str(torch.backends.cpu.get_cpu_capability()),
        "threads": pinned.threads,
        "mkl": _version(r"Math Kernel Library Version ([\d.]+)", build),
        "onednn": _version(r"MKL-DNN v([\d.]+)", build) if torch.backends.mkldnn.enabled else "off",
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "float32_precision": " ".join(f"{name}={value}" for name, value in _precisions(cuda).items()),
        "flush_denormal": int(torch.tensor([1e-40]).mul(1.0).item() == 0.0),
        "deterministic": int(torch.are_deterministic_algorithms_enabled()),
        "inductor": " ".join(f"{name}={getattr(inductor, name)}" for name in INDUCTOR_SETTINGS),
    }
    if cuda:
        key |= {
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
            "bf16_reduction": int(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
            "fp16_reduction": int(torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction),
        }
    for name in KERNEL_VARIABLES:
        if environment and name in environment:
            key[name] = environment[name]
    return key | dict(settings or {})


def _precisions(cuda: bool) -> dict[str, str]:
    backends: Any = torch.backends  # torch sets these attributes while running, where no type can see them
    if cuda:
        return {
            "cuda.matmul": backends.cuda.matmul.fp32_precision,
            "cudnn.conv": backends.cudnn.conv.fp32_precision,
            "cudnn.rnn": backends.cudnn.rnn.fp32_precision,
        }
    return {
        "mkldnn.matmul": backends.mkldnn.matmul.fp32_precision,
        "mkldnn.conv": backends.mkldnn.conv.fp32_precision,
        "mkldnn.rnn": backends.mkldnn.rnn.fp32_precision,
    }


def _processor() -> str:
    return str(torch.cpu.get_capabilities().get("cpu_name", "unknown"))


def _version(pattern: str, build: str) -> str:
    found = re.search(pattern, build)
    return found[1] if found else "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """The switches of torch that belong to the whole process."""

    deterministic: bool
    warn_only: bool
    fill: bool
    cudnn_benchmark: bool

    @classmethod
    def read(cls) -> _State:
        return cls(
            deterministic=torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            fill=bool(torch.utils.deterministic.fill_uninitialized_memory),  # type: ignore[attr-defined]
            cudnn_benchmark=bool(torch.backends.cudnn.benchmark),
        )

    def set(self) -> None:
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = self.fill  # type: ignore[attr-defined]
        if torch.backends.cudnn.benchmark != self.cudnn_benchmark:  # writing may be switched off
            torch.backends.cudnn.benchmark = self.cudnn_benchmark


@final
class _Switches:
    """Keep the switches at exact while anyone wants them so, and put them back after the last."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._holders = 0
        self._before: _State | None = None

    def take(self, *, fill: bool) -> None:
        with self._lock:
            if self._before is None:
                self._before = _State.read()
                _State(deterministic=True, warn_only=False, fill=fill, cudnn_benchmark=False).set()
            self._holders += 1

    def give_back(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0 and self._before is not None:
                self._before.set()
                self._before = None


# Torch's switches are one per process, so the count of those who hold them must be too: with a count in each
# run, the first of two ranks in one process to finish would unpin the other.
_SWITCHES = _Switches()
