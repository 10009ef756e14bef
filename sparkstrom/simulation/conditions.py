"""Conditions: what a seed's run is like: how narrow everything is and how much goes wrong.

Most runs are rough in some way; a few are calm, so that what only works in trouble is seen too.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from sparkstrom.protocol.common.topology import DEPTH
from sparkstrom.simulation.faults import NO_FAULTS, Faults
from sparkstrom.simulation.run_sizes import Replicas, Size, Through
from sparkstrom.simulation.sim_process import STEP_S_MIN

LINKS = "links"
CALM_SHARE = 0.05
BUFFERED_SHARE = 0.3
ENDPOINT_SHARE = 0.03  # takes more than twice as long as the others
CODEC_SHARE = 0.07  # the endpoint's messages go through their bytes, too
REAL_SHARE = 0.01
WHOLE_SHARE = 0.7
RESUMED_SHARE = 0.1
COPIES_SHARE = 0.2
ISOLATED_SHARE = 0.1
ROUGH_SHARE = 0.5
SLACK_MIN, SLACK_MAX = 0.1, 3.0  # of what would be needed to send all at once
RATE_MIN = 125_000.0  # 1 Mbit/s: below that nothing is promised
TROUBLE_SHARE = 0.3  # of the runs over links: that nothing goes wrong is what they are about
LINKS_END_S = 3_000.0
LINKS_START_S = 600.0  # each worker fetches its replica before training begins


def drawn(seed: int, nodes: int, mode: str) -> tuple[Size, Faults]:
    """Size and faults of this seed's run; ``mode``: plain, mesh, links or links-mesh."""
    if mode.startswith(LINKS):
        return linked(seed, nodes, mesh=mode != LINKS)
    chance = random.Random(f"conditions of {seed}")
    publish_every = chance.choice((1, 1, 1, 3))
    size = Size(
        nodes=nodes,
        max_lead=chance.choice((None, publish_every, publish_every + 1, 6)),
        publish_every=publish_every,
        log_bytes=chance.choice((1, 1_000, 4_000, 1_000_000)),
        window_bytes=chance.choice((1, 100, 600, 10_000)),
        downlink_bytes=chance.choice((1, 300, 2_000)),
        empty_partitions=chance.choice((0, 0, 0, 0, 0, 0, 0, 0, 0, 1)) if nodes > 1 else 0,
        kept_files=chance.choice((0, 1, nodes)),
    )
    staleness = random.Random(f"staleness of {seed}").choice((None, None, 0, 1, 3))
    size = replace(size, max_staleness=staleness)
    if mode == "mesh":
        size = _meshed(size, random.Random(f"mesh of {seed}"))
    size = replace(size, buffered=random.Random(f"buffers of {seed}").random() < BUFFERED_SHARE)
    size = replace(size, through=_through(seed))
    if random.Random(f"replicas of {seed}").random() < REAL_SHARE:
        size = replace(size, replicas=Replicas.REAL)
    size = replace(size, whole=random.Random(f"starts of {seed}").random() < WHOLE_SHARE)
    size = _resumed(size, random.Random(f"checkpoints of {seed}"))
    if random.Random(f"copies of {seed}").random() < COPIES_SHARE:
        size = replace(size, copies_of_all=1)
    last = random.Random(f"last copies of {seed}")
    if last.random() < COPIES_SHARE:
        size = replace(size, last_copies=last.choice((1, 2)))
    luck = chance.random()
    if luck < CALM_SHARE:
        return size, NO_FAULTS
    stop, failure = chance.choice(((0.0, 0.0), (0.0, 0.0), (0.5, 0.0), (0.0, 0.2)))
    faults = Faults(stop=stop, failure=failure)
    if luck < CALM_SHARE + ROUGH_SHARE:
        faults = _rougher(faults, nodes, chance)
        faults = _stranger(faults, random.Random(f"strange of {seed}"))
        alone = random.Random(f"isolations of {seed}").random() < ISOLATED_SHARE
        deaths = random.Random(f"deaths of {seed}").choice((0, 0, 1, nodes))
        faults = replace(faults, isolations=int(alone), driver_deaths=deaths)
    return size, faults


def _resumed(size: Size, chance: random.Random) -> Size:
    """Some fits go on from a checkpoint, and some want copies for one."""
    if chance.random() < COPIES_SHARE:
        size = replace(size, copies=chance.randint(1, 3))
    if chance.random() < RESUMED_SHARE:
        size = replace(size, resumed=chance.randint(1, 1 << 20))
    return size


def _through(seed: int) -> Through:
    luck = random.Random(f"bytes of {seed}").random()
    if luck < ENDPOINT_SHARE:
        return Through.ENDPOINT
    return Through.CODEC if luck < ENDPOINT_SHARE + CODEC_SHARE else Through.OBJECTS


def _meshed(size: Size, chance: random.Random) -> Size:
    """Narrow trees, so that few nodes make many levels; small sums, so that some are sent."""
    fan_out = chance.choice((2, 2, 3, 8))
    depth = DEPTH
    while fan_out == 2 and 2 ** (depth + 1) - 2 < 2 * size.nodes:
        depth += 1
    return replace(
        size,
        fan_out=fan_out,
        depth=depth,
        merged_bytes=chance.choice((200, 1_000, 1 << 30)),
        per_executor=chance.choice((1, 2, 3)),
    )


def linked(seed: int, nodes: int, *, mesh: bool) -> tuple[Size, Faults]:
    """Messages of real length over links that carry 0.1 to 3 times what training would fill."""
    chance = random.Random(f"links of {seed}")
    publish_every = chance.choice((0, 0, 1, 4))  # 0: as fast as the link takes them
    params = chance.choice((100_000, 100_000, 300_000, 1_000_000))
    fan_out = chance.choice((2, 3, 8))
    size = Size(
        nodes=nodes,
        epochs=3,
        batches=chance.choice((8, 16)),
        publish_every=publish_every,
        max_lead=chance.choice((None, max(1, publish_every), max(4, publish_every))),
        max_staleness=random.Random(f"staleness of {seed}").choice((None, 1, 1, 4)),
        log_bytes=chance.choice((8 << 20, 64 << 20)),
        window_bytes=8 << 20,
        downlink_bytes=4 << 20,
        per_executor=chance.choice((1, 1, 2)),
        kept_files=0,
        lease_s=10.0,
        patience_s=LINKS_START_S,
        end_s=LINKS_END_S,
        params=params,
        density=chance.choice((0.003, 0.01, 0.05, 0.13)),
    )
    if mesh:
        size = replace(size, fan_out=fan_out, depth=max(DEPTH, nodes.bit_length()))
    faults = replace(NO_FAULTS, step_s_max=chance.choice((0.1, 0.3, 0.6)))
    slack = math.exp(chance.uniform(math.log(SLACK_MIN), math.log(SLACK_MAX)))
    rate = max(RATE_MIN, slack * needed_rate(size, faults.step_s_max))
    faults = replace(
        faults,
        rate=rate,
        narrow=chance.choice((0, 0, 1)),
        narrows=chance.choice((0, 0, 1)),
        slow_pollers=chance.choice((0, 0, 1)),
    )
    if chance.random() < TROUBLE_SHARE:
        faults = replace(
            faults,
            crashes=chance.choice((0, 1)),
            cuts=chance.choice((0, 1)),
            pauses=chance.choice((0, 1)),
            breaks=chance.choice((0, 1)),
            edge_deaths=chance.choice((0, 1)),
        )
    return size, faults


def needed_rate(size: Size, step_s_max: float) -> float:
    """Bytes per second that leave the driver's host where everybody trains unhindered."""
    step_s = STEP_S_MIN + step_s_max / 4  # slowness is drawn up to that, and each step up to it
    commits = size.nodes / (step_s * max(1, size.publish_every))
    children = min(size.fan_out, size.nodes) if size.mesh else size.nodes
    return commits * size.weights.update_bytes * children


def _rougher(faults: Faults, nodes: int, chance: random.Random) -> Faults:
    """More of everything, in a mixture of its own."""
    many = 2 + nodes // 2
    return replace(
        faults,
        loss=chance.choice((0.0, 0.05, 0.25)),
        repeat=chance.choice((0.0, 0.1)),
        delay_ms_max=chance.choice((2.0, 40.0, 200.0)),
        late=chance.choice((0.0, 0.02, 0.2)),
        step_s_max=chance.choice((0.03, 0.2, 0.6)),
        crashes=chance.randint(0, many),
        executor_crashes=chance.randint(0, 1),
        doubles=chance.randint(0, 2),
        cuts=chance.randint(0, many),
        pauses=chance.randint(0, many),
        breaks=chance.randint(0, 2),
        exiles=chance.choice((0, 0, 0, 1)),
        master_lost=chance.choice((0, 0, 0, 0, 0, 0, 0, 1)),
        master_pauses=chance.randint(0, 2),
        edge_deaths=chance.randint(0, many),
        restart_s_max=chance.choice((1.0, 4.0, 8.0)),
        bandwidth=chance.choice((0.0, 0.0, 0.0, 200_000.0)),
    )


def _stranger(faults: Faults, chance: random.Random) -> Faults:
    """Networks that fall apart, clocks that do not agree, machines that are slow."""
    return replace(
        faults,
        splits=chance.choice((0, 0, 1)),
        slow=chance.choice((0, 0, 1)),
        drift=chance.choice((0.0, 0.0, 0.03)),
        leaps=chance.choice((0, 0, 3)),
    )


def changed(size: Size, faults: Faults, given: dict[str, Any]) -> tuple[Size, Faults]:
    """The same with some values given."""
    of_size = {name: value for name, value in given.items() if hasattr(size, name)}
    of_faults = {name: value for name, value in given.items() if hasattr(faults, name)}
    return replace(size, **of_size), replace(faults, **of_faults)
