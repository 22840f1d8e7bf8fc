"""`tandem plan`: the topologies in which a model fits on a number of GPUs, and the expected speed
of each topology."""

from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Group
from rich.markup import escape

from tandem.cli.common import Json, Targets, data_extra, show, table
from tandem.errors import InvalidInput, from_validation_error
from tandem.families.adapter import default_targets
from tandem.families.registry import merged_problem, read_arch
from tandem.planning.memory import GIB, Memory, Workload
from tandem.planning.plan import ROW, Candidate, describe, servers_to_keep_busy
from tandem.planning.plan import plan as make_plan
from tandem.spool.schema import LoraShape

SOURCE = (
    "Speed is an estimate from operations and from rates measured on one H200"
    " (bench/results/train.json); ~: nobody has measured this topology, and the time of exchanges"
    " is an assumption."
)
ALL_WEIGHTS = "What training all weights needs is computed; three measured jobs are within 4 %."
SHOWN = 10


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A Hugging Face directory or hub name; only config.json is read."
        ),
    ],
    gpus: Annotated[int, typer.Option(min=1, max=1024, help="GPUs of the trainer.")],
    sequence_length: Annotated[
        int | None,
        typer.Option(
            min=2, help=f"Slots of a packed row.  \\[default: {ROW}, or the model's positions]"
        ),
    ] = None,
    gpu_memory: Annotated[
        float, typer.Option(min=1, help="GiB of each GPU that ranks may use.")
    ] = 79.0,
    rows: Annotated[
        int, typer.Option(min=1, help="Rows of one optimizer step, over all ranks.")
    ] = 8,
    rank: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Rank of the LoRA.  \\[default: 16]")
    ] = None,
    target: Targets = None,
    full: Annotated[bool, typer.Option("--full", help="All weights instead of a LoRA.")] = False,
    server_speed: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="New tokens per second of one inference server, as you measured them: how many"
            " servers keep this trainer busy.",
        ),
    ] = None,
    generated: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=1,
            help="With --server-speed: the share of a row's slots that is generated.",
        ),
    ] = 1.0,
    every: Annotated[
        bool, typer.Option("--all", help="Show all topologies, also those that don't fit.")
    ] = False,
    json: Json = False,
) -> None:
    """Show in which topologies a model fits, with the memory of each GPU and the expected speed,
    and recommend one topology."""
    with data_extra("a model of the hub"):
        arch = read_arch(model)
    if full and (target or rank is not None):
        raise InvalidInput(
            "--full trains all weights; leave --rank and --target out", field="--full"
        )
    if full and (problem := merged_problem(arch)):
        raise InvalidInput(
            f"{problem}, and runs of all weights are served so; leave --full out", field="--full"
        )
    slots = sequence_length or min(ROW, arch.max_positions)
    if slots > arch.max_positions:
        problem = f"{slots} is more than the model's {arch.max_positions} positions"
        raise InvalidInput(
            f"{problem}, so no job may have such rows; lower it", field="--sequence-length"
        )
    try:
        lora = LoraShape.model_validate(
            {"rank": rank or 16, "targets": target or default_targets(arch)}
        )
    except ValidationError as error:
        raise InvalidInput(from_validation_error(error).message, field="--target") from error
    made = make_plan(Workload(arch, None if full else lora, slots, rows), gpus, gpu_memory * GIB)
    shown = (
        made.candidates
        if every
        else [one for one in made.candidates if one.levels is not None][:SHOWN]
    )
    data: dict[str, Any] = {
        "recommended": made.recommended.sizes.settings(),
        "why": made.why,
        "source": f"{SOURCE} {ALL_WEIGHTS}" if full else SOURCE,
        "topologies": [_row(one) for one in shown],
    }
    if server_speed is not None:
        data["inference"] = _servers(made.recommended, server_speed, generated)
    show(data, json, lambda _: _rendered(data, made.recommended.memory))


def _servers(best: Candidate, speed: float, share: float) -> dict[str, Any]:
    count = servers_to_keep_busy(best.tokens_per_second, speed, share)
    what = "inference servers" if count > 1 else "inference server"
    why = (
        f"{count} {what} of {speed:,.0f} new tokens/s (given) generate what this trainer trains"
        f" meanwhile: {best.tokens_per_second:,.0f} slots/s, {share:.0%} of them generated."
        " Assumed: rollouts go on while a job trains, each token is trained once, and servers add"
        " up, which nobody has measured."
    )
    return {"servers": count, "why": why}


def _row(one: Candidate) -> dict[str, Any]:
    """A topology as a row of the table. The row shows the memory, in GiB, of the rank that needs
    the most memory."""
    needs, levels = one.memory, one.levels or (0, 0)
    parts = {
        "weights": needs.weights,
        "adapter": needs.adapter,
        "gradients": needs.gradients,
        "optimizer": needs.optimizer,
        "activations": needs.activations(levels),
        "logits or a layer": needs.working(levels),
        "CUDA and NCCL": needs.context,
        "total": one.total,
    }
    return {
        "topology": describe(one.sizes),
        "settings": one.sizes.settings(),
        "fits": one.levels is not None,
        "tokens_per_second": round(one.tokens_per_second),
        "measured": one.measured,
        "layers": needs.layers,
        "keep_all": levels[0],
        "keep_attention": levels[1],
        "gib": {name: round(size / GIB, 2) for name, size in parts.items()},
    }


def _rendered(data: dict[str, Any], best: Memory) -> object:
    rows = []
    for row in data["topologies"]:
        speed = (
            f"{'' if row['measured'] else '~'}{row['tokens_per_second']:,}"
            if row["fits"]
            else "does not fit"
        )
        gib = row["gib"]
        sizes = [f"{gib[name]:.1f}" for name in ("weights", "activations", "total")]
        rows.append([row["topology"], speed, f"{row['keep_all']} of {row['layers']}", *sizes])
    columns = ["topology", "tokens/s#", "layers kept#", "weights#", "activations#", "total GiB#"]
    parts = [[name, f"{size:.2f}"] for name, size in data["topologies"][0]["gib"].items()]
    levels = (("everything", (best.layers, 0)), ("attention", (0, best.layers)), ("inputs", (0, 0)))
    parts += [
        [f"activations, if layers keep {name}", f"{best.activations(kept) / GIB:.2f}"]
        for name, kept in levels
    ]
    lines = [data["why"], data["recommended"], data["source"]]
    if "inference" in data:
        lines.append(data["inference"]["why"])
    return Group(
        table("GiB on each GPU", columns, rows),
        table("The recommended one", ["part", "GiB#"], parts),
        escape("\n".join(map(str, lines))),
    )
