"""Tests of plan_fit: what takes memory in a fit, and which settings the plan recommends."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.fit.strategy import GradientSharing
from sparkstrom.models import Adam, DenseNetwork, Sgd
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.network import VoidConfiguration
from sparkstrom.options.resolution import resolve
from sparkstrom.planning.memory import MIB, ModelFootprint, footprint_of_model, sum_parts
from sparkstrom.planning.plan import FitPlan, WorkerCounts, format_plan, plan_fit
from sparkstrom.spark.executor_slots import check_conf, compute_slots, count_workers

N = 10 * MIB  # so that a vector of parameters has 40 MiB
DEMAND = ModelFootprint(N)
PLACING = WorkerCounts(8, 2)
MASTER = SharedTrainingMaster()


def plan(
    demand: ModelFootprint = DEMAND, placing: WorkerCounts = PLACING, **options: object
) -> FitPlan:
    return plan_fit(demand, placing, replace(MASTER, **options))  # type: ignore[arg-type]


def get_settings(made: FitPlan) -> dict[str, str]:
    """Return the settings of the plan's ``--conf`` lines, as in a Spark configuration."""
    pairs = [line.removeprefix("--conf ").partition("=") for line in made.conf()]
    return {key: value for key, _, value in pairs}


def test_worker_memory_includes_optimizer_library_and_buffers() -> None:
    """Optimizer state, the library's code and buffers count in a worker's memory."""
    sgd = sum_parts(plan(replace(DEMAND, optimizer="sgd")).worker)
    assert sum_parts(plan().worker) - sgd == 4 * 40 * MIB  # two vectors of Adam, and copies of both
    assert sum_parts(plan(replace(DEMAND, library="dense")).worker) < sum_parts(plan().worker)
    buffers = sum_parts(plan(replace(DEMAND, buffers_bytes=MIB)).worker)
    assert buffers - sum_parts(plan().worker) == 3 * MIB


def test_controller_on_executor_adds_slot_and_memory() -> None:
    """A controller in a task needs one more slot, and memory of an executor."""
    there = plan(void=VoidConfiguration(controller="executor"))
    assert get_settings(plan())["spark.executor.cores"] == "2"
    assert get_settings(there)["spark.executor.cores"] == "3"
    assert get_settings(there)["spark.sparkstrom.controller"] == "executor"
    assert there.executor_overhead - plan().executor_overhead == plan().driver_overhead


@pytest.mark.parametrize("controller", ["driver", "executor"])
@pytest.mark.parametrize(("workers", "per_executor"), [(8, 4), (4, 4), (4, 2), (3, 1), (1, 1)])
def test_a_fit_has_the_planned_number_of_workers(
    controller: str, workers: int, per_executor: int
) -> None:
    """With the plan's settings, a fit counts as many workers as were planned."""
    void = VoidConfiguration(controller=controller)
    conf = get_settings(plan(placing=WorkerCounts(workers, per_executor), void=void))
    slots = compute_slots(conf, "yarn", (), lambda: 0, lambda: 0)
    strategy = GradientSharing(resolve(SharedTrainingMaster(), conf, {}))
    assert count_workers(slots, strategy) == workers


def test_rejects_workers_that_executors_cannot_share_equally() -> None:
    """Otherwise the fit would have more workers than planned."""
    with pytest.raises(UsageError, match="plan 8 or 12 workers"):
        WorkerCounts(10, 4)


def test_memory_options_change_planned_memory() -> None:
    """batch_memory_bytes, log_bytes and train_on change the planned memory."""
    more = plan(batch_memory_bytes=MASTER.batch_memory_bytes + MIB)
    assert more.executor_overhead - plan().executor_overhead == 2 * MIB  # of each of two workers
    void = VoidConfiguration(log_bytes=MASTER.void.log_bytes + MIB)
    assert plan(void=void).driver_overhead - plan().driver_overhead == MIB
    replica = plan(train_on="replica")
    assert sum_parts(replica.worker) - sum_parts(plan().worker) == 40 * MIB


def test_checkpoints_add_driver_memory() -> None:
    """Checkpoints need memory on the driver; all workers' optimizer states need more than one."""
    one = plan(checkpoint_directory="kept")
    assert sum_parts(one.driver) - sum_parts(plan().driver) == 3 * 40 * MIB + 3 * 2 * 40 * MIB
    everybodys = plan(checkpoint_directory="kept", checkpoint_updaters="all")
    assert sum_parts(everybodys.driver) - sum_parts(one.driver) == (8 - 1) * 2 * 2 * 40 * MIB
    assert everybodys.driver_overhead - one.driver_overhead == (8 - 1) * 2 * 2 * 40 * MIB
    assert get_settings(everybodys)["spark.sparkstrom.checkpoint_updaters"] == "all"
    assert sum_parts(everybodys.worker) == sum_parts(plan().worker)


def test_shared_memory_grows_with_executors_relays_and_workers() -> None:
    """Shared memory grows with executors per host, with relays, and with the number of workers."""
    three = plan(placing=WorkerCounts(8, 2, executors_per_host=3))
    assert three.network.shared_memory_host == 3 * plan().network.shared_memory_host
    mesh = plan(void=VoidConfiguration(mesh_build_mode="mesh"))
    assert mesh.network.shared_memory_executor > plan().network.shared_memory_executor
    many = plan(placing=WorkerCounts(64, 2)), plan(placing=WorkerCounts(8, 2))
    assert many[0].network.shared_memory_driver > many[1].network.shared_memory_driver


def test_port_range_grows_with_executors_per_host() -> None:
    """The range of ports grows with the executors of a host, and may not end above 65535."""
    first, last = plan(placing=WorkerCounts(200, 1, executors_per_host=100)).network.ports
    assert (first, last - first + 1) == (40_123, 201)
    void = VoidConfiguration(unicast_port=5000)
    assert plan(void=void).network.ports == (5000, 5063)
    assert plan(void=VoidConfiguration(unicast_port=65_500)).network.ports == (65_500, 65_535)
    assert plan(void=VoidConfiguration(unicast_port=65_533)).network.ports == (65_533, 65_535)
    with pytest.raises(UsageError, match=r"a host needs 3 ports from there on, but .* 65535"):
        plan(void=VoidConfiguration(unicast_port=65_534))


def test_planned_settings_pass_check_of_fit() -> None:
    """The plan's settings pass the check of a fit; 1 MB less overhead does not."""
    void = VoidConfiguration(log_bytes=100 * MIB, mesh_build_mode="mesh")
    made = plan(void=void, batch_memory_bytes=64 * MIB)
    conf = get_settings(made) | {"spark.master": "yarn"}
    master = resolve(SharedTrainingMaster(), conf, {})
    assert (master.void.log_bytes, master.batch_memory_bytes) == (100 * MIB, 64 * MIB)
    assert master.void.executor_ports() == range(made.network.ports[0], made.network.ports[1] + 1)
    assert check_conf(conf, 8, DEMAND, master) == []
    less = int(conf["spark.executor.memoryOverhead"].removesuffix("m")) - 1
    assert check_conf(conf | {"spark.executor.memoryOverhead": f"{less}m"}, 8, DEMAND, master)


def test_footprint_has_parameters_optimizer_and_library() -> None:
    """A dense network's footprint has its parameters, optimizer and library."""
    model = DenseNetwork([4, 3, 2], updater=Sgd(0.1))
    assert footprint_of_model(model) == ModelFootprint(23, "sgd", "dense", 0)
    assert footprint_of_model(DenseNetwork([4, 2], updater=Adam())).optimizer == "adam"


def test_torch_footprint_has_library_and_buffers() -> None:
    """A torch model's footprint has its library and its buffers."""
    torch = pytest.importorskip("torch", reason="not installed: pip install 'sparkstrom[torch]'")
    from sparkstrom.models.torch import TorchModel

    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    demand = footprint_of_model(TorchModel(module, torch.nn.MSELoss(), torch.optim.SGD))
    assert demand.library == "torch"
    assert demand.buffers_bytes > 0


def test_plan_text_names_overhead_in_at_most_100_columns() -> None:
    """Parts sum up to totals, and these to the overheads to set; lines have at most 100 columns."""
    made = plan()
    text = format_plan(made)
    assert max(map(len, text.splitlines())) <= 100
    totals = []
    for section in text.split("\n\n")[:3]:  # a worker, a media driver, the driver program
        *parts, total = [
            int(size.replace(",", "")) for size in re.findall(r"([\d,]+) MiB", section)
        ]
        assert sum(parts) == total
        totals.append(total)
    worker, media_driver, driver = totals
    settings = get_settings(made)
    assert settings["spark.executor.memoryOverhead"] == f"{2 * worker + media_driver}m"
    assert settings["spark.driver.memoryOverhead"] == f"{driver + media_driver}m"
    assert all(line in text for line in made.conf())


@pytest.mark.parametrize(
    ("demand", "placing", "words"),
    [
        ({"n_params": -1}, {}, "params=-1"),
        ({"n_params": 0}, {}, "params=0"),
        ({"optimizer": "adamant"}, {}, "optimizer='adamant'.*adamw"),
        ({"library": "mxnet"}, {}, "library='mxnet'.*torch"),
        ({"buffers_bytes": -1}, {}, "buffers=-1"),
        ({}, {"workers": 0}, "workers=0"),
        ({}, {"per_executor": 0}, "workers_per_node=0"),
        ({}, {"per_executor": 9}, "workers_per_node=9: there are 8"),
        ({}, {"executors_per_host": 0}, "executors_per_host=0"),
    ],
)
def test_impossible_plan_values_are_refused(
    demand: dict[str, int], placing: dict[str, int], words: str
) -> None:
    """Impossible values are refused with a message that names the option."""
    with pytest.raises(UsageError, match=words):
        plan(replace(DEMAND, **demand), replace(PLACING, **placing))  # type: ignore[arg-type]
