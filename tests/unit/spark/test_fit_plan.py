"""A plan: parts come from options and the model, and the lines to set are what a fit wants."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.models import Adam, DenseNetwork, Sgd
from sparkstrom.spark.driver.cluster import check_conf
from sparkstrom.spark.driver.discovery import VoidConfiguration
from sparkstrom.spark.driver.fit_plan import FitPlan, Placing, plan_fit, text_of_plan
from sparkstrom.spark.driver.memory_parts import MIB, Demand, demand_of, total
from sparkstrom.spark.driver.settings import resolve
from sparkstrom.spark.driver.training_master import SharedTrainingMaster

N = 10 * MIB  # so that a vector of parameters has 40 MiB
DEMAND = Demand(N)
PLACING = Placing(8, 2)
MASTER = SharedTrainingMaster()


def plan(demand: Demand = DEMAND, placing: Placing = PLACING, **options: object) -> FitPlan:
    return plan_fit(demand, placing, replace(MASTER, **options))  # type: ignore[arg-type]


def set_in(made: FitPlan) -> dict[str, str]:
    """What its lines set, as Spark would have it."""
    pairs = [line.removeprefix("--conf ").partition("=") for line in made.conf()]
    return {key: value for key, _, value in pairs}


def test_an_optimizers_state_and_a_librarys_code_count() -> None:
    sgd = total(plan(replace(DEMAND, optimizer="sgd")).worker)
    assert total(plan().worker) - sgd == 4 * 40 * MIB  # two vectors, and what is kept of them
    assert total(plan(replace(DEMAND, library="dense")).worker) < total(plan().worker)
    buffers = total(plan(replace(DEMAND, buffers_bytes=MIB)).worker)
    assert buffers - total(plan().worker) == 3 * MIB


def test_a_controller_in_a_task_counts() -> None:
    there = plan(void=VoidConfiguration(controller="executor"))
    assert set_in(plan())["spark.executor.instances"] == "4"
    assert set_in(there)["spark.executor.instances"] == "5"  # eight workers, and one slot more
    assert set_in(there)["spark.sparkstrom.controller"] == "executor"
    assert set_in(there)["spark.sparkstrom.workers_per_node"] == "-1"  # 9 of 10 slots
    assert there.executor_overhead - plan().executor_overhead == plan().driver_overhead


def test_options_that_take_memory_count() -> None:
    more = plan(batch_memory_bytes=MASTER.batch_memory_bytes + MIB)
    assert more.executor_overhead - plan().executor_overhead == 2 * MIB  # of each of two workers
    void = VoidConfiguration(log_bytes=MASTER.void.log_bytes + MIB)
    assert plan(void=void).driver_overhead - plan().driver_overhead == MIB
    replica = plan(train_on="replica")
    assert total(replica.worker) - total(plan().worker) == 40 * MIB


def test_checkpoints_count_on_the_driver() -> None:
    one = plan(checkpoint_directory="kept")
    assert total(one.driver) - total(plan().driver) == 3 * 40 * MIB + 3 * 2 * 40 * MIB
    everybodys = plan(checkpoint_directory="kept", checkpoint_updaters="all")
    assert total(everybodys.driver) - total(one.driver) == (8 - 1) * 2 * 2 * 40 * MIB
    assert everybodys.driver_overhead - one.driver_overhead == (8 - 1) * 2 * 2 * 40 * MIB
    assert set_in(everybodys)["spark.sparkstrom.checkpoint_updaters"] == "all"
    assert total(everybodys.worker) == total(plan().worker)


def test_hosts_and_neighbours_count_in_shared_memory() -> None:
    three = plan(placing=Placing(8, 2, executors_per_host=3))
    assert three.shared_memory_host == 3 * plan().shared_memory_host
    mesh = plan(void=VoidConfiguration(mesh_build_mode="mesh"))
    assert mesh.shared_memory_executor > plan().shared_memory_executor
    many = plan(placing=Placing(64, 2)), plan(placing=Placing(8, 2))
    assert many[0].shared_memory_driver > many[1].shared_memory_driver


def test_ports_are_enough_for_a_host() -> None:
    first, last = plan(placing=Placing(200, 1, executors_per_host=100)).ports
    assert (first, last - first + 1) == (40_123, 201)
    void = VoidConfiguration(unicast_port=5000)
    assert plan(void=void).ports == (5000, 5063)
    with pytest.raises(UsageError, match="65535"):
        plan(void=VoidConfiguration(unicast_port=65_500))


def test_what_it_says_to_set_is_what_fit_is_content_with() -> None:
    void = VoidConfiguration(log_bytes=100 * MIB, mesh_build_mode="mesh")
    made = plan(void=void, batch_memory_bytes=64 * MIB)
    conf = set_in(made) | {"spark.master": "yarn"}
    master = resolve(SharedTrainingMaster(), conf, {})
    assert (master.void.log_bytes, master.batch_memory_bytes) == (100 * MIB, 64 * MIB)
    assert master.void.executor_ports() == range(made.ports[0], made.ports[1] + 1)
    assert check_conf(conf, 8, DEMAND, master) == []
    less = int(conf["spark.executor.memoryOverhead"].removesuffix("m")) - 1
    assert check_conf(conf | {"spark.executor.memoryOverhead": f"{less}m"}, 8, DEMAND, master)


def test_a_models_own_demand() -> None:
    model = DenseNetwork([4, 3, 2], updater=Sgd(0.1))
    assert demand_of(model) == Demand(23, "sgd", "dense", 0)
    assert demand_of(DenseNetwork([4, 2], updater=Adam())).optimizer == "adam"


def test_a_torch_models_demand() -> None:
    torch = pytest.importorskip("torch", reason="not installed: pip install 'sparkstrom[torch]'")
    from sparkstrom.models.torch import TorchModel

    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    demand = demand_of(TorchModel(module, torch.nn.MSELoss(), torch.optim.SGD))
    assert demand.library == "torch"
    assert demand.buffers_bytes > 0


def test_text_adds_up_and_fits_the_screen() -> None:
    text = text_of_plan(plan())
    assert "spark.executor.memoryOverhead=" in text
    assert max(map(len, text.splitlines())) <= 100


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
def test_what_no_fit_can_have_is_refused(
    demand: dict[str, int], placing: dict[str, int], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        plan(replace(DEMAND, **demand), replace(PLACING, **placing))  # type: ignore[arg-type]
