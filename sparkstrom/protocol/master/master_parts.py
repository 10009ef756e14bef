"""Master's parts: of what it is made, and who knows whom. None knows one that is made later."""

from __future__ import annotations

from collections.abc import Callable

from sparkstrom.base.identity import Endpoint
from sparkstrom.protocol.common.children import Children
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.common.ignored import Ignored
from sparkstrom.protocol.common.leases import Leases
from sparkstrom.protocol.master.admission import Admission
from sparkstrom.protocol.master.broadcast import Broadcast
from sparkstrom.protocol.master.closed_notices import ClosedNotices
from sparkstrom.protocol.master.closing import Closing
from sparkstrom.protocol.master.commit_order import CommitOrder
from sparkstrom.protocol.master.master_limits import MasterLimits
from sparkstrom.protocol.master.members import Members
from sparkstrom.protocol.master.optimizer_sources import OptimizerSources
from sparkstrom.protocol.master.partitions import Partitions
from sparkstrom.protocol.master.phases import Phases
from sparkstrom.protocol.master.placement import Placement
from sparkstrom.protocol.master.residual_checkpoints import CheckpointFiles, ResidualCheckpoints
from sparkstrom.protocol.master.sequencer import Sequencer
from sparkstrom.protocol.master.statuses import Statuses
from sparkstrom.protocol.master.updater_copies import UpdaterCopies
from sparkstrom.protocol.master.vacancies import Vacancies
from sparkstrom.protocol.master.welcomes import Welcomes


class MasterParts:
    """What there is of the master; see each one's own module."""

    def __init__(
        self,
        spec: FitSpec,
        *,
        chunks: int,
        endpoint: Endpoint,
        limits: MasterLimits,
        now_s: float,
        kept: CheckpointFiles | None = None,
        average: Callable[[list[bytes]], bytes] | None = None,
    ) -> None:
        self.spec, self.limits, self.chunks = spec, limits, chunks
        self.ignored, self.leases = ignored, leases = Ignored(), Leases(limits.lease_s, now_s)
        self.sequencer = sequencer = Sequencer(limits.log_bytes, ignored)
        self.children = children = Children(limits.serving, sequencer.history, leases)
        self.partitions = Partitions.of(spec, now_s)
        self.checkpoints = ResidualCheckpoints(kept or {})
        self.members = members = Members(self.partitions, self.checkpoints)
        self.phases = phases = Phases(limits, members, sequencer, children)
        self.notices = ClosedNotices(limits.lease_s, members, sequencer)
        self.broadcast = Broadcast(
            limits.lease_s,
            members=members,
            sequencer=sequencer,
            phases=phases,
            notices=self.notices,
            children=children,
        )
        self.order = CommitOrder(
            sequencer,
            members=members,
            phases=phases,
            notices=self.notices,
            children=children,
            average=average,
        )
        self.placement = Placement(
            limits,
            endpoint,
            members=members,
            leases=leases,
            children=children,
            welcomes=Welcomes(chunks, members, sequencer, self.broadcast),
            now_s=now_s,
        )
        self.sources = OptimizerSources(members, ignored)
        self.copies = UpdaterCopies(limits.lease_s, members, self.sources, ignored)
        if limits.last_copies is not None:
            phases.awaits_copies = lambda: self.copies.is_awaited
        self.vacancies = Vacancies(limits, members, phases, now_s)
        self._put_together()

    def _put_together(self) -> None:
        """What several parts do in common."""
        self.closing = Closing(
            self.limits.lease_s,
            members=self.members,
            leases=self.leases,
            placement=self.placement,
            order=self.order,
            notices=self.notices,
        )
        self.admission = Admission(
            self.spec.version,
            members=self.members,
            phases=self.phases,
            order=self.order,
            placement=self.placement,
            closing=self.closing,
            ignored=self.ignored,
        )
        self.statuses = Statuses(
            members=self.members,
            phases=self.phases,
            order=self.order,
            placement=self.placement,
            notices=self.notices,
            ignored=self.ignored,
        )
