"""The ranks of a session, met: the transport between them, and what this process pins for the bits."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self, final

import torch

from samestep.comm.connect import meet
from samestep.comm.transport import Transport
from samestep.loop.facts import ONE_KIND, key_of_run, run_facts
from samestep.loop.run_settings import RunSettings
from samestep.loop.walk import Plan, Walk
from samestep.numerics.exact import pin
from samestep.processes.stop_signals import Stopped
from samestep.sync.agreement import require_equal
from samestep.topology.devices import device_of
from samestep.topology.environment import Environment, Place, settle_interface


@final
class Meeting:
    """Lasts as long as its `with` block; every rank must leave it for anybody to leave it well."""

    transport: Transport
    device: torch.device

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        """Collective. Meet the other ranks, and pin what the bits depend on."""
        settings = self._settings
        with ExitStack() as resources:
            self._environment = Environment.current()
            place = self._environment.place()
            rendezvous = None
            if settings.transport is None:
                # Before a device is chosen: a launcher may leave open which ranks share a machine.
                rendezvous = meet(place, timeout_s=settings.timeout_s)
                place = rendezvous.place
            self.device = settings.device or device_of(place)
            workspace = self._environment.cublas_workspace
            self._pinned = resources.enter_context(
                pin(threads=settings.threads, device=self.device, cublas_workspace=workspace)
            )
            if rendezvous is not None:
                self._place = place
                settle_interface(place)
                self.transport = rendezvous.connect(self.device)
                resources.callback(self.transport.close)
            elif settings.transport is not None:
                self._place = Place(reason="a transport was given")
                self.transport = settings.transport
            resources.push(self._part)
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        """Collective where all went well. Part from the other ranks."""
        return self._resources.__exit__(kind, error, traceback)

    def numerics_key(self, batches: Plan) -> dict[str, str | int]:
        """Return what the bits of this rank depend on."""
        return key_of_run(
            pinned=self._pinned,
            environment=self._environment,
            batches=batches,
            precision=self._settings.precision,
            reduction=self._settings.reduction,
        )

    def require_alike(self, walk: Walk, key: dict[str, str | int], *, has_weights: bool) -> None:
        """Collective. Raise Disagreement where ranks were started with unlike settings or unlike kernels."""
        facts = self._settings.shared_facts(walk.batches, walk.num_steps)
        facts["whether weights of loss terms are given"] = has_weights
        require_equal(self.transport, facts, device=self.device)
        kernels = {f"the numerics key's {name}": value for name, value in key.items()}
        require_equal(self.transport, kernels, device=self.device, remedy=ONE_KIND)

    def facts(self, batches: Plan, key: dict[str, str | int]) -> dict[str, object]:
        """Return what a reader of the run may ask later."""
        settings = self._settings
        return run_facts(
            place=self._place,
            pinned=self._pinned,
            batches=batches,
            precision=settings.precision,
            seed=settings.seed,
            strategy=settings.strategy,
            reduction=settings.reduction,
            key=key,
        )

    def _part(
        self,
        kind: type[BaseException] | None,  # noqa: ARG002  the signature of a context's exit
        error: BaseException | None,
        traceback: TracebackType | None,  # noqa: ARG002
    ) -> None:
        """Wait for the others where all went well: nobody may hang up while another still reads."""
        if error is None or isinstance(error, Stopped):
            self.transport.ballot(torch.zeros(1, dtype=torch.int64))
