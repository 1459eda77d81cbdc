"""``daskps plan``: predict how a job, or one of the paper's models, would run on a number of nodes."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from typing import Any

import click

from daskps.budget import terms_text
from daskps.cli.command import command, facts, table
from daskps.config import read_job
from daskps.errors import ArgumentError
from daskps.plan import (
    PAPER_HARDWARE,
    Estimate,
    Hardware,
    Value,
    Workload,
    calibrate,
    memory_terms,
    paper_workload,
    plan,
    workload_of,
)
from daskps.plan.paper import E_SPEED_UP, MODELS, price_performance
from daskps.settings import parse_bytes
from daskps.view.words import short, size

EPILOG = """\b
Examples:
  daskps plan                                       model E of the paper on its hardware
  daskps plan --model C --nodes 1,4,16
  daskps plan pipelines/demo.toml --nodes 1,2,4,8   a job, from rates measured elsewhere
  daskps plan --calibrate runs/demo --rows 1e9      a finished run, grown to a billion rows
  daskps plan --calibrate runs/demo --network 25e9 --memory 256GB --disk 4TB --cost 3.5 --json

Every value that was fitted or assumed is listed below the table. daskps runs on at most 64 nodes.
"""
NODES = "1,2,4,8,16,32,64"  # default of --nodes
BUDGETS = ("memory_bytes", "hbm_bytes", "disk_bytes")


@click.command(epilog=EPILOG)
@click.argument("job", required=False, type=click.Path(dir_okay=False))
@click.option("--model", type=click.Choice([*MODELS], case_sensitive=False), help="One of the paper's models.")
@click.option("--calibrate", "run", type=click.Path(exists=True), help="Model directory of a finished run.")
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Change a setting of JOB.")
@click.option("--nodes", default=NODES, show_default=True, help="Numbers of nodes, separated by commas.")
@click.option("--rows", type=click.FloatRange(1), help="Rows that the model will have; for JOB or --calibrate.")
@click.option("--cores", type=click.IntRange(1), help="Cores of a node, for JOB; by default those of this machine.")
@click.option("--memory", help="Memory of a node; by default 1TB (--model), 64GB (--calibrate) or the job's budget.")
@click.option("--disk", help="Disk of a node.")
@click.option("--hbm", help="HBM of all devices of a node.")
@click.option("--network", type=float, help="Bytes/s of a node's network in one direction: 12.5e9 is 100 Gb/s.")
@click.option("--network-share", type=click.FloatRange(0, 1, min_open=True), help="Fraction of it for rows and sums.")
@click.option("--cost", type=click.FloatRange(0, min_open=True), help="Cost of a node, in any unit.")
@command
def plan_command(
    job: str | None,
    model: str | None,
    run: str | None,
    assignments: tuple[str, ...],
    nodes: str,
    rows: float | None,
    cores: int | None,
    **machine: Any,
) -> tuple[Any, ...]:
    """Predict stage times, bottleneck, memory, disk, examples/s and examples per cost on 1 to 64 nodes.

    The workload is that of JOB, of a finished run (--calibrate), or of a model of the paper (--model, by default E).
    """
    if sum(given is not None for given in (job, model, run)) > 1:
        raise click.UsageError("give JOB, --model or --calibrate, not several of them")
    if job is None and (cores is not None or assignments):
        raise click.UsageError("--cores and --set are for JOB: a finished run and the paper's models cannot be changed")
    if job is None and run is None and rows is not None:
        raise click.UsageError("--rows is for JOB and --calibrate: the paper's models have a given number of rows")
    letter = None
    if run is not None:
        work, values = calibrate(run, rows)
        base = _local(work)
    elif job is not None:
        settings = read_job(job, assignments)
        work, values = workload_of(settings, cores=cores or len(os.sched_getaffinity(0)), rows=rows)
        base = replace(_local(work), memory_bytes=settings.budget.memory_bytes, hbm_bytes=settings.budget.hbm_bytes)
    else:
        letter = model or "E"
        work, values = paper_workload(letter)
        base = PAPER_HARDWARE
    hardware = _changed(base, machine)
    if hardware.network_share != PAPER_HARDWARE.network_share:
        values = [value for value in values if value.name != "network_share"]
        values.append(Value("network_share", hardware.network_share, "assumed", "--network-share"))
    elif letter is None:
        values.append(Value("network_share", hardware.network_share, "assumed", "rows' part of the line rate"))
    estimates = plan(work, hardware, _numbers(nodes))
    answer: dict[str, Any] = {
        "workload": asdict(work),
        "hardware": asdict(hardware),
        "values": [asdict(value) for value in values],
        "nodes": [asdict(estimate) for estimate in estimates],
    }
    if letter is not None:
        for estimate, one in zip(answer["nodes"], estimates, strict=True):
            estimate["price_performance_against_mpi"] = price_performance(letter, one.examples_per_cost)
        answer["paper"] = {"speed_up": E_SPEED_UP} if letter.upper() == "E" else {}
    text = _text(work, hardware, estimates, values, letter)
    if job is not None:
        allowed: dict[str, int | None] = {name: int(getattr(hardware, name)) for name in BUDGETS}
        planned = settings.model_copy(update={"budget": settings.budget.model_copy(update=allowed)})
        terms = memory_terms(planned, work, settings.cluster.nodes)
        answer["memory"] = {"allowed": allowed, "terms": [term.as_json() for term in terms]}
        text += f"\n\nmemory of one node ({settings.cluster.nodes} in all), by term:\n{terms_text(terms, allowed)}"
    return answer, text


def _local(work: Workload) -> Hardware:
    """Return default hardware for jobs and runs; options change it."""
    return Hardware("as given", memory_bytes=64e9, disk_bytes=1e12, hbm_bytes=64e9, network_bytes_per_second=1.25e9)


def _changed(base: Hardware, machine: dict[str, Any]) -> Hardware:
    sizes = {f"{name}_bytes": machine.pop(name) for name in ("memory", "disk", "hbm")}
    try:
        changes: dict[str, Any] = {name: parse_bytes(text) for name, text in sizes.items() if text is not None}
    except ValueError as error:
        raise ArgumentError(str(error)) from None
    if machine["network"] is not None:
        changes["network_bytes_per_second"] = machine["network"]
    changes |= {name: machine[name] for name in ("network_share", "cost") if machine[name] is not None}
    return replace(base, **changes)


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ArgumentError(f"--nodes wants numbers with commas, such as {NODES}; got {text!r}") from None


def _text(
    work: Workload, hardware: Hardware, estimates: list[Estimate], values: list[Value], letter: str | None
) -> str:
    head = facts(
        [
            ("workload", work.name),
            ("a node's batch", f"{short(work.batch_examples)} examples, {short(work.distinct_keys)} distinct keys"),
            ("model", f"{short(work.rows)} rows of {work.row_bytes:.0f} bytes, {short(work.dense_parameters)} dense"),
            ("a node", f"{hardware.name}; {size(hardware.memory_bytes)} memory, {size(hardware.disk_bytes)} disk"),
        ]
    )
    stages = list(work.stage_seconds)
    names = ("nodes", *(f"{stage} s" for stage in stages), "bottleneck", "examples/s", "speed-up", "per cost")
    names += ("index", "in flight", "disk", "HBM", "does not fit")
    rows = [
        (
            str(one.nodes),
            *(f"{one.stage_seconds[stage]:.3g}" for stage in stages),
            one.bottleneck,
            f"{one.examples_per_second:,.0f}",
            f"{one.speed_up:.2f}",
            f"{one.examples_per_cost:,.0f}",
            *(size(count) for count in (one.index_bytes, one.flight_bytes, one.disk_bytes, one.hbm_bytes)),
            ", ".join(one.problems) or "-",
        )
        for one in estimates
    ]
    lines = [head, "", table(rows, names), "", "bytes are of one node; seconds of one batch", ""]
    lines += ["fitted, assumed and measured values:"]
    lines += [f"  {value.name} = {value.value:,.6g} ({value.kind}: {value.why})" for value in values]
    if letter is not None:
        lines += ["", *_against_paper(letter, estimates)]
    return "\n".join(lines)


def _against_paper(letter: str, estimates: list[Estimate]) -> list[str]:
    lines = []
    for one in estimates:
        if one.nodes == 4:
            lines.append(
                f"4 nodes: {price_performance(letter, one.examples_per_cost):.1f} times the examples per cost of the "
                f"{MODELS[letter.upper()].mpi_nodes} MPI nodes that the paper compares with"
            )
        if letter.upper() == "E" and (stated := E_SPEED_UP.get(one.nodes)):
            lines.append(
                f"the paper's speed-up on {one.nodes} nodes is {stated}, this is {one.speed_up:.2f} "
                f"({100 * (one.speed_up / stated - 1):+.1f}%); it depends on network_share, which is assumed"
            )
    return lines


plan_command.name = "plan"
