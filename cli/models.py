"""`fleetbed models list`, `fit` and `check-memory`: costs of variants, which devices can train them, how accurate."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from msgspec import Struct, structs

from fleetbed.cli.common import AsJson, ProfileFolders, print_json, print_table, without_collector
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Data, Experiment, Optimizer
from fleetbed.profiles.loading import decode
from fleetbed.profiles.resolve import clients_of, load_experiment, load_fleet, search_folders
from fleetbed.profiles.settings import apply_settings
from fleetbed.profiles.types import ClientSpec
from fleetbed.profiles.yaml_text import plain, shorten

if TYPE_CHECKING:
    from fleetbed.models.base import Family, InputSpec
    from fleetbed.models.cost.choose import FitRow

app = typer.Typer(help="Show what model variants cost, and which of them a device can train.", no_args_is_help=True)

MIB = 1 << 20
DEFAULT_IMAGE = "3x32x32"
DEFAULT_WINDOW = (3, 128)  # channels and time of sensor values

FamilyNames = Annotated[
    list[str] | None, typer.Option("--family", metavar="NAME", help="Only this family; may be repeated.")
]
Batch = Annotated[int, typer.Option("--batch", help="Samples per training step.")]
Image = Annotated[str, typer.Option("--image", metavar="CxHxW", help="Channels, height and width of the images.")]
Classes = Annotated[int, typer.Option("--classes", help="Number of classes in the data.")]
OptimizerName = Annotated[Literal["sgd", "adam"], typer.Option("--optimizer", help="SGD uses a momentum of 0.9.")]


class _Variant(Struct, kw_only=True):
    family: str
    variant: str
    parameters: int
    macs: float  # of one sample's forward pass
    forward_flops: float  # likewise
    training_flops: float  # of one sample
    state_bytes: int
    memory_bytes: int
    memory: dict[str, int]


@app.command("list")
@without_collector()
def list_variants(
    names: FamilyNames = None,
    batch: Batch = 16,
    image: Image = DEFAULT_IMAGE,
    classes: Classes = 10,
    optimizer: OptimizerName = "sgd",
    as_json: AsJson = False,
) -> None:
    """List every variant of every family with its size, its FLOPs and its peak memory in training."""
    import torch

    from fleetbed.models.cost.predict import cost, forward_flops
    from fleetbed.models.families import lookup
    from fleetbed.models.work import Work, usual_parts

    _check_batch(batch)
    torch.set_num_threads(1)  # models run on single samples here, where more threads only wait for each other
    rows = []
    for name in names or lookup.family_names():
        family = lookup.family(name)
        spec = _spec(family, image, classes)
        for variant in family.variants:
            parts = usual_parts(family.outline(variant, spec))
            work = Work(steps=1, batch=batch, held_models=1).through_parts(parts)
            found = cost(family, variant, spec, work, Optimizer(name=optimizer))
            forward = forward_flops(family, variant, spec)
            rows.append(
                _Variant(
                    family=name,
                    variant=variant,
                    parameters=found.parameters,
                    macs=forward / 2,
                    forward_flops=forward,
                    training_flops=found.flops / batch,
                    state_bytes=found.state_bytes,
                    memory_bytes=found.memory_bytes,
                    memory=found.memory,
                )
            )
    if as_json:
        print_json(rows)
        return
    print_table(
        f"Images of {image}, {classes} classes; trained with {optimizer}, batch {batch}, received weights included",
        ("family", "variant", "parameters", "MMACs", "MFLOPs forward", "MFLOPs training", "state MiB", "peak MiB"),
        [
            (
                row.family,
                row.variant,
                row.parameters,
                round(row.macs / 1e6, 2),
                round(row.forward_flops / 1e6, 2),
                round(row.training_flops / 1e6, 2),
                round(row.state_bytes / MIB, 2),
                round(row.memory_bytes / MIB, 1),
            )
            for row in rows
        ],
    )
    _print_options([lookup.family(name) for name in names or lookup.family_names()])


def _print_options(families: Sequence[Family]) -> None:
    """Print what an experiment can set under model.options, for each family that has options."""
    from msgspec import inspect

    from fleetbed.emulator.method.description import default_text
    from fleetbed.profiles.explain import describe

    rows = [
        (family.name, field.encode_name, describe(field.type), default_text(structs_field))
        for family in families
        for field, structs_field in zip(
            inspect.type_info(family.options_type).fields,  # type: ignore[attr-defined]
            structs.fields(family.options_type),
            strict=True,
        )
    ]
    print_table("model.options", ("family", "option", "value", "default"), rows)


@app.command()
@without_collector()
def fit(
    context: typer.Context,
    experiment: Annotated[
        str | None, typer.Argument(help="The name or YAML file of an experiment, in place of the options below.")
    ] = None,
    fleet: Annotated[str | None, typer.Option("--fleet", help="The name or file of a fleet.")] = None,
    family: Annotated[str, typer.Option("--family", help="The family to choose from.")] = "resnet-stage",
    batch: Batch = 16,
    optimizer: OptimizerName = "sgd",
    samples: Annotated[int, typer.Option("--samples", help="Training samples per client.")] = 500,
    image: Image = DEFAULT_IMAGE,
    classes: Classes = 10,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="As in an experiment, such as budgets.round_s=60."),
    ] = None,
    profiles: ProfileFolders = None,
    as_json: AsJson = False,
) -> None:
    """Show which variant each device of a fleet or an experiment can train, and what stops the next larger one.

    With an experiment, the figures are those of its methods, its data and its budgets. With --fleet, they are
    predictions for one round in which the weights travel both ways.
    """
    if (experiment is None) == (fleet is None):
        raise BadInput("models fit needs either an experiment or --fleet FLEET.")
    if experiment is not None:
        for option in ("family", "batch", "optimizer", "samples", "image", "classes"):
            if str(context.get_parameter_source(option)).endswith("COMMANDLINE"):
                raise BadInput(f"--{option} belongs to --fleet; with an experiment, change its key with --set.")
        _fit_experiment(experiment, sets or (), search_folders(profiles, experiment), as_json)
        return
    from fleetbed.models.families import lookup

    assert fleet is not None
    _check_batch(batch)
    _check_range("--samples", samples, 1, 1_000_000_000)
    search = search_folders(profiles)
    tree = {
        "title": "models fit",
        "fleet": fleet,
        "model": {"family": family},
        "training": {"batch": batch, "optimizer": {"name": optimizer}},
        "algorithms": [{"name": "fedavg"}],
    }
    asked = decode(apply_settings(tree, sets or ()), Experiment, "models fit")
    chosen = lookup.family(asked.model.family, asked.model.options).narrow(asked.model.variants)
    spec = _spec(chosen, image, classes)
    clients = clients_of(load_fleet(asked.fleet, search, "--fleet"), search, asked.fleet)
    rows = [_fit(group, chosen, spec, asked, samples) for group in _alike(clients)]
    if as_json:
        print_json(rows)
        return
    _print_fit(
        f"{asked.fleet}: {chosen.name} at batch {asked.training.batch} with {asked.training.optimizer.name}, "
        f"{samples} samples, epochs: {asked.training.epochs}; {asked.budgets.memory_margin:.0%} of the cap stays free",
        rows,
    )


def _fit_experiment(name: str, sets: Sequence[str], search: Sequence[Path], as_json: bool) -> None:
    asked = load_experiment(name, search, sets)
    from fleetbed.emulator.run.fit_table import fit_experiment

    rows = fit_experiment(asked, search)
    if as_json:
        print_json(rows)
        return
    for method in dict.fromkeys(row.method for row in rows):
        title = f"{method} on {asked.fleet}; {asked.budgets.memory_margin:.0%} of the cap stays free"
        _print_fit(title, [row for row in rows if row.method == method])


def _print_fit(title: str, rows: Sequence[FitRow]) -> None:
    print_table(
        title,
        ("device", "count", "variant", "memory / cap MiB", "compute s", "transfer s", "MiB per round", "next larger"),
        [
            (
                row.device,
                len(row.clients),
                row.variant or "none",
                f"{row.memory_bytes / MIB:.0f} / {row.cap_bytes / MIB:.0f}",
                float(f"{row.compute_s:.3g}"),
                float(f"{row.transfer_s:.3g}"),
                round(row.round_bytes / MIB, 2),
                row.reason,
            )
            for row in rows
        ],
    )


@app.command("check-memory")
def check_memory(
    names: FamilyNames = None,
    methods: Annotated[
        list[str] | None, typer.Option("--method", metavar="NAME", help="Only this method; may be repeated.")
    ] = None,
    batches: Annotated[str, typer.Option("--batches", metavar="N,N,...", help="Batch sizes.")] = "8,16,64",
    every: Annotated[
        bool, typer.Option("--all", help="Every variant, not only the smallest, the middle and the largest.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the table as Markdown.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train in real processes and compare the kernel's memory count with the prediction.

    Every family is trained as FedAvg does it, and every method on one family that it goes with. --family and --method
    choose among them.
    """
    from fleetbed.emulator.checks.memory_check import (
        HEADER,
        Meter,
        checked_methods,
        compare_memory,
        method_cases,
        standard_cases,
        summarise_memory,
        to_markdown,
    )
    from fleetbed.models.families import lookup

    try:
        sizes = [int(part) for part in batches.split(",")]
    except ValueError:
        raise BadInput(
            f"--batches is {batches!r}, but it must be numbers separated by commas, such as 8,16,64."
        ) from None
    for size in sizes:
        _check_batch(size, "--batches")
    if out is not None and not out.parent.is_dir():
        raise BadInput(f"--out {out}: the folder {out.parent} does not exist.")
    if not (names or methods):
        names, methods = list(lookup.family_names()), checked_methods()
    cases = [*standard_cases(names or (), sizes, every=every), *method_cases(methods or (), sizes)]
    results = []
    with Meter() as meter:
        for case in cases:
            results.append(compare_memory(case, meter))
            if not as_json:  # it takes minutes
                print(plain(" ".join(results[-1].cells)), file=sys.stderr)
        backend = meter.backend
    if out is not None:
        out.write_text(to_markdown(results, backend))
    summary = summarise_memory(results)
    if as_json:
        print_json({"backend": backend, "summary": summary, "results": results})
        return
    print_table("Memory in training", HEADER, [result.cells for result in results])
    print(summary.sentence)


def _alike(clients: Sequence[ClientSpec]) -> list[list[ClientSpec]]:
    """Group the clients that have the same device and link, in the order of the fleet."""
    groups: dict[tuple[object, ...], list[ClientSpec]] = {}
    for client in clients:
        groups.setdefault((client.kind, repr(client.device), client.link_name), []).append(client)
    return list(groups.values())


def _fit(group: list[ClientSpec], family: Family, spec: InputSpec, asked: Experiment, samples: int) -> FitRow:
    from fleetbed.emulator.method.schedule import batch_of, steps_of
    from fleetbed.models.cost.choose import FitRow, choose_variant, transfer_seconds
    from fleetbed.models.cost.operations import compute_seconds
    from fleetbed.models.cost.predict import cost
    from fleetbed.models.work import Work, usual_parts

    training = asked.training
    plain = Work(steps=steps_of(samples, training), batch=batch_of(samples, training.batch), held_models=1)

    def work(variant: str) -> Work:
        return plain.through_parts(usual_parts(family.outline(variant, spec)))

    device, link = group[0].device, group[0].link
    choice = choose_variant(
        device=device,
        link=link,
        family=family,
        spec=spec,
        work=work,
        optimizer=training.optimizer,
        budgets=asked.budgets,
        seconds=lambda variant, work: compute_seconds(
            device, cost(family, variant, spec, work, training.optimizer).operations
        ),
    )
    return FitRow(
        device=group[0].kind,
        link=group[0].link_name,
        clients=[client.number for client in group],
        variant=choice.variant,
        memory_bytes=choice.cost.memory_bytes,
        cap_bytes=round(device.cap_mib * MIB),
        compute_s=compute_seconds(device, choice.cost.operations),
        transfer_s=transfer_seconds(link, choice.cost.state_bytes, choice.cost.state_bytes),
        round_bytes=2 * choice.cost.state_bytes,
        reason=choice.reason,
        stopped_by=choice.stopped_by,
    )


def _spec(family: Family, image: str, classes: int) -> InputSpec:
    """Return the input of a family: the requested image, or a text or a window of the default length."""
    from fleetbed.models.base import InputSpec

    _check_range("--classes", classes, 2, 10_000)
    if family.reads == "text":
        data = Data()
        spec = InputSpec((data.tokens,), classes, data.vocabulary)
    elif family.reads == "values":
        spec = InputSpec(DEFAULT_WINDOW, classes)
    else:
        spec = InputSpec(_image(image), classes)
    family.check_input(spec)
    return spec


def _image(text: str) -> tuple[int, ...]:
    sizes = text.lower().split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and len(size) < 9 and 1 <= int(size) <= 2048 for size in sizes):
        raise BadInput(
            f"--image is {shorten(text)}, but it must be channels, height and width from 1 to 2048, as {DEFAULT_IMAGE}."
        )
    return tuple(int(size) for size in sizes)


def _check_batch(batch: int, option: str = "--batch") -> None:
    _check_range(option, batch, 1, 1_000_000)


def _check_range(option: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise BadInput(f"{option} is {value}, but it must be a number from {least} to {most}.")
