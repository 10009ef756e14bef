"""The device: a GPU where there is one, Numba's simulator in a process started for it.

``NUMBA_ENABLE_CUDASIM=1 pytest tests/gpu`` simulates; ``laws/test_encoding_cuda.py`` does that in
every run of the suite.
"""

from __future__ import annotations

from hypothesis import Phase, settings

from sparkstrom.encoding.cuda import bitmaps, device, device_functions, levels, memory, scan
from sparkstrom.encoding.cuda import parameter_kernels as steps
from sparkstrom.encoding.cuda.device import SIMULATED

# Looking for the smallest example that fails takes the simulator minutes.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate] if SIMULATED else list(Phase)
settings.register_profile(
    "gpu", deadline=None, max_examples=10 if SIMULATED else 100, phases=PHASES
)


# The simulator's threads look through the globals of a kernel's module at every call. Python adds
# a key to them at the first warning that comes from there; it has to be there before.
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
