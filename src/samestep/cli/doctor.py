"""`samestep doctor`: what is here, what was detected and why, and what should be changed before training."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samestep.errors import ConfigError, SamestepError
from samestep.topology.advice import GIB, Advice, advise, advise_clock, advise_together
from samestep.topology.detect import Candidate
from samestep.topology.environment import Environment, settle_interface
from samestep.topology.inventory import inventory
from samestep.topology.meeting_point import HERE
from samestep.topology.network import is_loopback
from samestep.topology.place import Place

if TYPE_CHECKING:
    from samestep.comm.transport import Transport


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    links: Annotated[bool, typer.Option(help="Measure the links between ranks.")] = True,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for other ranks.")] = 60.0,
) -> None:
    """Tell what was detected and why, and what to change; exit 1 where training is impossible."""
    environment = Environment.current()
    found = environment.candidates()
    try:
        place = environment.place()
    except ConfigError:
        if not as_json:
            say(launcher_lines(found))
        raise
    facts = inventory(environment, place)
    facts["candidates"] = [asdict(candidate) for candidate in found]
    facts |= _with_torch()
    facts["interface"] = settle_interface(place)
    facts["is_loopback"] = facts["interface"] is not None and is_loopback(facts["interface"])
    ranks: list[Mapping[str, Any]] = [facts]
    failure: Advice | None = None
    if facts["torch_error"] is None and (links or place.world_size > 1):
        try:
            ranks, facts["links"] = _with_others(place, facts, measured=links, timeout_s=timeout_s)
        except SamestepError as error:
            failure = Advice(fatal=True, text=f"The ranks cannot be joined: {error}")
    advice = [*_all_advice(ranks, facts.get("links")), *([failure] if failure else [])]
    if place.rank == 0 or failure is not None:
        if as_json:
            told = {"ranks": ranks, "links": facts.get("links"), "advice": [asdict(item) for item in advice]}
            say([json.dumps(told, indent=2)])
        else:
            say(report(facts, ranks, advice))
    raise SystemExit(1 if any(item.fatal for item in advice) else 0)


def say(lines: Sequence[str]) -> None:
    """Print at once."""
    print("\n".join(lines), flush=True)


def launcher_lines(found: Sequence[Candidate | Mapping[str, Any]]) -> list[str]:
    """Return the table of the launchers that were considered."""
    rows = [asdict(row) if isinstance(row, Candidate) else row for row in found]
    return [f"  {row['launcher']:<20} {row['verdict']:<12} {row['reason']}" for row in rows] or [
        "  no launcher's variables are set"
    ]


def report(
    facts: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], advice: Sequence[Advice]
) -> list[str]:
    """Return the lines for people: this rank in full, the others one line each, and the advice."""
    place = facts["place"]
    lines = ["launcher", *launcher_lines(facts["candidates"])]
    lines += [f"  this process: rank {place['rank']} of {place['world_size']} ({place['reason']})"]
    if place["rendezvous"]:
        lines += [f"  ranks meet at: {place['rendezvous']} {place['job']}".rstrip()]
    lines += ["machine", *machine_lines(facts), "network", *_network_lines(facts)]
    if len(ranks) > 1:
        lines += ["ranks", *_rank_lines(ranks)]
    if facts.get("links"):
        lines += ["links", *_link_lines(facts["links"], len(ranks))]
    lines += ["advice", *[f"  {'must: ' if item.fatal else ''}{item.text}" for item in advice]]
    return lines if advice else [*lines, "  nothing to change"]


def machine_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return the lines about versions, devices, cores, memory, disks and limits."""
    cores, memory, shared = facts["cores"], facts["memory"], facts["shared_memory"]
    versions = {**facts["versions"], "CUDA": facts["cuda"], "NCCL": facts["nccl"]}
    threads = ", ".join(f"{name}={value}" for name, value in facts["threads"].items())
    disks = ", ".join(f"{_gib(disk['free'])} free in {disk['path']}" for disk in facts["disks"].values())
    told = {name: "unlimited" if value is None else value for name, value in facts["limits"].items()}
    return [
        f"  {facts['machine']['host']}, {facts['machine']['system']}",
        "  versions: " + ", ".join(f"{name} {value or 'none'}" for name, value in versions.items()),
        "  devices: " + (", ".join(facts["devices"]) or "processors only"),
        f"  cores: {cores['usable']} usable of {cores['machine']} (affinity "
        f"{cores['affinity'] or 'unknown'}, control group {cores['quota'] or 'no limit'}); threads: "
        + (threads or "no variable set"),
        f"  memory: {_gib(memory['available'])} free of {_gib(memory['total'])}"
        + (f", control group {_gib(memory['limit'])}" if memory["limit"] else ""),
        f"  disk: {disks}",
        "  /dev/shm: " + (f"{_gib(shared['free'])} free of {_gib(shared['total'])}" if shared else "none"),
        "  ulimits: " + ", ".join(f"{name} {value}" for name, value in told.items()),
    ]


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def _network_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    for interface in facts["interfaces"]:
        state = "up" if interface["up"] else "down"
        speed = f", {interface['megabits_per_s']} Mbit/s" if interface["megabits_per_s"] else ""
        yield f"  {interface['name']}: {state}{speed}, {', '.join(interface['addresses']) or 'no address'}"
    name, rendezvous = facts["interface"], facts["place"]["rendezvous"]
    if name in facts["interface_of_the_user"].values():
        why = "set by the user"
    elif rendezvous is None:
        why = "one rank needs none"
    elif name is None:
        why = "no route to the meeting point: gloo chooses"
    elif facts["is_loopback"]:
        why = "all ranks are on this machine"
    else:
        why = f"on the route to {rendezvous}"
    yield f"  chosen: {name or 'none'} ({why})"


def _rank_lines(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for facts in ranks:
        place = facts["place"]
        yield (
            f"  rank {place['rank']}: {facts['machine']['host']}, local rank {place['local_rank']} of "
            f"{place['local_world_size']}, {len(facts['devices'])} devices, {facts['cores']['usable']} "
            f"cores, {_gib(facts['memory']['available'])} free, interface {facts['interface']}"
        )


def _link_lines(links: Mapping[str, Any], world_size: int) -> Iterator[str]:
    who = "all ranks" if world_size > 1 else "two ranks of this machine over gloo"
    yield f"  a ballot of {who}: {links['ballot_us']:.0f} us"
    for link in links["links"]:
        clock = f", clock {link['clock_ahead_s'] * 1e3:+.1f} ms" if world_size > 1 else ""
        yield (
            f"  rank 0 - rank {link['rank']}: {link['latency_us']:.0f} us one way, "
            f"{link['megabytes_per_s']:.0f} MB/s each way{clock}"
        )


def _with_torch() -> dict[str, Any]:
    """Return what only torch knows; it takes seconds to import, and may fail."""
    found: dict[str, Any] = {"torch_error": None, "devices": [], "cuda": None, "nccl": None}
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of it is missing
        return found | {"torch_error": str(error)}
    count = torch.cuda.device_count()
    found["cuda"] = torch.version.cuda
    for index in range(count):
        device = torch.cuda.get_device_properties(index)
        found["devices"].append(f"cuda:{index} {device.name}, {device.total_memory / GIB:.0f} GiB")
    if count:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def _with_others(
    place: Place, facts: Mapping[str, Any], *, measured: bool, timeout_s: float
) -> tuple[list[Mapping[str, Any]], dict[str, Any] | None]:
    """Collective. Return the facts of all ranks, and the links; a single rank measures two of this "
    "machine."""
    import torch

    from samestep.comm.connect import meet
    from samestep.comm.links import gather_texts, measure, measure_pair
    from samestep.topology.devices import device_of

    if place.world_size == 1:
        settle_interface(Place(world_size=2, local_world_size=2, reason="", rendezvous=HERE))
        return [facts], measure_pair().plain() if measured else None
    rendezvous = meet(place, timeout_s=timeout_s)
    device = device_of(rendezvous.place)
    place_told = facts["place"] | {
        name: getattr(rendezvous.place, name) for name in ("local_rank", "local_world_size")
    }
    transport: Transport = rendezvous.connect(device)
    with contextlib.closing(transport):
        texts = gather_texts(transport, json.dumps({**facts, "place": place_told}), device)
        links = measure(transport, device).plain() if measured else None
        transport.ballot(torch.zeros(1, dtype=torch.int64))  # none leaves before the last measurement
    return [json.loads(text) for text in texts], links


def _all_advice(ranks: Sequence[Mapping[str, Any]], links: Mapping[str, Any] | None) -> list[Advice]:
    """Return the advice for all ranks, each once however many ranks of a machine it is for."""
    found: dict[Advice, list[int]] = {}
    for facts in ranks:
        for item in advise(facts):
            found.setdefault(item, []).append(facts["place"]["rank"])
    alone = len(ranks) == 1
    advice = [
        item if alone else Advice(fatal=item.fatal, text=f"rank {', '.join(map(str, whom))}: {item.text}")
        for item, whom in found.items()
    ]
    advice += advise_together(list(ranks))
    if links is not None and not alone:
        for link in links["links"]:
            host = ranks[link["rank"]]["machine"]["host"]
            advice += advise_clock(link["rank"], host, link["clock_ahead_s"])
    return advice
