"""Settings of the tests on a GPU or, in a process of their own, on Numba's CUDA simulator.

``NUMBA_ENABLE_CUDASIM=1 pytest tests/gpu`` simulates; ``laws/test_encoding_cuda.py`` does that in
every run of the suite.
"""

from __future__ import annotations

from hypothesis import Phase, settings

from sparkstrom.encoding.cuda import bitmaps, device, device_functions, levels, memory, scan
from sparkstrom.encoding.cuda import parameter_kernels as steps
from sparkstrom.encoding.cuda.device import SIMULATED

# Shrinking an example that fails takes the simulator minutes.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate] if SIMULATED else list(Phase)
settings.register_profile(
    "gpu", deadline=None, max_examples=10 if SIMULATED else 100, phases=PHASES
)


# The simulator's threads iterate over the globals of a kernel's module at every call. Python adds
# the key __warningregistry__ to them at the module's first warning: it must exist before.
KERNEL_MODULES = (
    bitmaps,
    device,
    device_functions,
    levels,
    memory,
    scan,
    steps,
)


def pytest_configure() -> None:
    if SIMULATED:  # this process runs nothing else
        settings.load_profile("gpu")
        from tests.gpu import simulated_threads

        simulated_threads.replace_threads()
        for module in KERNEL_MODULES:
            vars(module).setdefault("__warningregistry__", {})
