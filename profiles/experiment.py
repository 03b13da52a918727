"""The types of an experiment, which one YAML file describes completely, and of its runs."""

from __future__ import annotations

from itertools import product
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from fleetbed.profiles.files import title_of
from fleetbed.profiles.sweep import at_point, count_points, point_text, points
from fleetbed.profiles.types import (
    Clients,
    Count,
    Fraction,
    NonNegative,
    Positive,
    Profile,
    Seconds,
    Watts,
)

FLOWER = "flower"  # the name of the algorithm that a Flower app is
TimingSource = Literal["enforced", "modelled", "metered", "replay"]
#: the sources of time that other load on the host, and the host itself, do not affect
UNDISTURBED: tuple[TimingSource, ...] = ("modelled", "replay")
Processes = Literal["resident", "on-demand", "inline", "ray"]
PolicyKind = Literal["sync", "deadline", "over-select", "async", "buffered"]
# Part of a folder's name, so it must not be a path: no slash, no control character, no dot first. `$` alone would allow
# a newline at the end. `loading` checks what a pattern cannot express, and also the names of methods.
Label = Annotated[str, Meta(pattern=r"^[^/\\\x00-\x1f\x7f.][^/\\\x00-\x1f\x7f]{0,59}$(?!\n)")]
Seed = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Batch = Annotated[int, Meta(ge=1, le=1_000_000)]
Epochs = Annotated[int, Meta(ge=1, le=100_000)]
Steps = Annotated[int, Meta(ge=1, le=100_000_000)]
Width = Annotated[int, Meta(ge=1, le=65_536)]  # of a layer
Stay = Annotated[float, Meta(ge=1, le=1e10)]  # seconds; shorter ones would make the timeline very slow


class ServerChoice(Profile, frozen=True, kw_only=True):
    """The server is a device too: its computing and transfers take device time."""

    device: str = "server"
    link: str = "ethernet_1g"


class Partition(Profile, frozen=True, kw_only=True):
    """How samples are divided. `alpha` belongs to dirichlet, `classes_per_client` to shards, `column` to column,
    `file` to file.

    With `column` each client has the samples of one user or more, by a column of the data set such as `user`. Of any
    kind, a share `halved` of the clients, drawn at random, keeps half of its training samples.
    """

    kind: Literal["iid", "dirichlet", "shards", "contiguous", "column", "file"] = "dirichlet"
    alpha: Annotated[float, Meta(ge=1e-4, le=1e9)] = 0.5
    min_size: Count = 10
    classes_per_client: Count = 2
    column: str | None = None
    file: str | None = None
    halved: Fraction = 0.0


class Data(Profile, frozen=True, kw_only=True):
    """The data set. `name` is one of `fleetbed data list`, whose files are in `root`, or a path."""

    name: str = "fashion-mini"
    root: str | None = None
    download: bool = False
    partition: Partition = Partition()
    image_size: Annotated[int, Meta(ge=1, le=1024)] | None = None
    channels: Literal[1, 3] | None = None
    normalise: bool = True
    augment: tuple[Literal["crop", "flip", "cutout"], ...] = ()
    train_limit: Count | None = None
    test_limit: Count | None = None
    public: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0
    tokens: Annotated[int, Meta(ge=1, le=100_000)] = 25
    vocabulary: Annotated[int, Meta(ge=1, le=10_000_000)] = 10_000


class Model(Profile, frozen=True, kw_only=True):
    """The family whose variants clients choose from: a name, or the path of a Python file with models of your own.

    `variants` selects some of its variants, `options` are those of the family.

    `assign` fixes the choice as papers do: the clients, in order, are divided into as many groups as it has variants,
    as equal in size as possible, and each group trains one variant, whether it fits the devices' memory or not.

    `choose` sets the algorithms under which a variant must fit: with `per-method` only the run's own algorithm, with
    `common` every algorithm of the experiment, so that all of them are compared on the same models. An algorithm with
    its own `variant` is not included.
    """

    family: str = "resnet-stage"
    variants: tuple[str, ...] = ()
    assign: tuple[str, ...] = ()
    choose: Literal["per-method", "common"] = "per-method"
    options: dict[str, Any] = {}  # noqa: RUF012 (msgspec copies it)


class Optimizer(Profile, frozen=True, kw_only=True):
    """`momentum` belongs to sgd; with `decay_biases: false` only parameters without `bias` in their name decay."""

    name: Literal["sgd", "adam"] = "sgd"
    lr: Positive = 0.01
    momentum: Fraction = 0.9
    weight_decay: NonNegative = 0.0
    decay_biases: bool = True


class LearningRate(Profile, frozen=True, kw_only=True):
    """A new learning rate from the beginning of `round` on; rounds count from 1."""

    round: Count
    lr: Positive


class Training(Profile, frozen=True, kw_only=True):
    """The training of a client in a round: `epochs` over its samples, at most `max_steps` steps.

    `schedule` changes the optimiser's learning rate at given rounds. `on_divergence` sets whether a run continues when
    a loss, a client's result or the server's model is no longer finite.
    """

    batch: Batch = 16
    epochs: Epochs = 1
    max_steps: Steps | None = None
    optimizer: Optimizer = Optimizer()
    schedule: tuple[LearningRate, ...] = ()
    on_divergence: Literal["continue", "stop"] = "continue"

    def optimizer_in(self, round_: int) -> Optimizer:
        """Return the optimiser with the learning rate of this round."""
        rates = [change.lr for change in self.schedule if change.round <= round_]
        return replace(self.optimizer, lr=rates[-1]) if rates else self.optimizer


class AlgorithmChoice(Profile, frozen=True, kw_only=True):
    """A method by name, or by the path of a Python file; `label` distinguishes two settings of one method in plots.

    `variant` puts every client on the one variant (AllSmall, AllLarge) instead of what fits it or `model.assign` says.
    `model` replaces the experiment's for this algorithm: a table may set methods for different families side by side.
    """

    name: str
    params: dict[str, Any] = {}  # noqa: RUF012 (msgspec copies it)
    label: Label | None = None
    variant: str | None = None
    model: Model | None = None

    @property
    def title(self) -> str:
        return self.label or title_of(self.name)


class FlowerApp(Profile, frozen=True, kw_only=True):
    """A Flower app, which takes the place of algorithms, data, model, training and policies.

    `app` is its folder; `run_config` overrides values of its `[tool.flwr.app.config]`. A call of the ClientApp that has
    taken `hang_s` seconds on the host counts as hung.
    """

    app: str
    run_config: dict[str, bool | int | float | str] = {}  # noqa: RUF012 (msgspec copies it)
    hang_s: Seconds = 3600.0


class Participation(Profile, frozen=True, kw_only=True):
    """`ratio` of the fleet takes part in a round, chosen by `selection`; `last_ratio` of it in the last round."""

    ratio: Annotated[float, Meta(gt=0, le=1)] = 1.0
    last_ratio: Annotated[float, Meta(gt=0, le=1)] | None = None
    selection: Literal["uniform", "available", "tier"] = "uniform"
    tiers: Clients = 5


class Policy(Profile, frozen=True, kw_only=True):
    """When a result counts: a policy by name, or by the path of a Python file; `label` distinguishes two settings.

    The other fields belong to the kinds in their description.
    """

    kind: str = "sync"
    label: Label | None = None
    params: Annotated[dict[str, Any], Meta(description="your own policy: its parameters")] = {}  # noqa: RUF012
    deadline_s: Annotated[Seconds | None, Meta(description="deadline: device seconds a round may take")] = None
    late: Annotated[Literal["drop", "next-round"], Meta(description="deadline: how late results are handled")] = "drop"
    partial: Annotated[bool, Meta(description="deadline: a client near the deadline sends its unfinished result")] = (
        False
    )
    invite: Annotated[Clients | None, Meta(description="over-select: the number of clients that start")] = None
    take: Annotated[Clients | None, Meta(description="over-select: the number of first results that count")] = None
    buffer: Annotated[Clients | None, Meta(description="buffered: the number of results in a merge")] = None
    concurrency: Annotated[Clients | None, Meta(description="async, buffered: tasks in flight")] = None
    mixing: Annotated[float, Meta(gt=0, le=1, description="async, buffered: weight of a fresh result")] = 0.6
    staleness: Annotated[
        Literal["constant", "polynomial", "hinge"],
        Meta(description="async, buffered: how the weight falls with staleness"),
    ] = "polynomial"
    exponent: Annotated[NonNegative, Meta(description="staleness polynomial: (1 + staleness)^-exponent")] = 0.5
    hinge_a: Annotated[Positive, Meta(description="staleness hinge: slope beyond hinge_b")] = 10.0
    hinge_b: Annotated[NonNegative, Meta(description="staleness hinge: up to this staleness the weight is full")] = 4.0

    @property
    def title(self) -> str:
        return self.label or title_of(self.kind)


class Availability(Profile, frozen=True, kw_only=True):
    """When clients can take part. Each field belongs to the kind in its description; `bandwidth` belongs to all."""

    kind: Literal["always", "on-off", "charging", "trace"] = "always"
    mean_on_s: Annotated[Stay, Meta(description="on-off: mean time that a client is available")] = 3600.0
    mean_off_s: Annotated[Stay, Meta(description="on-off: mean time that it is away")] = 3600.0
    battery_wh: Annotated[float, Meta(ge=1e-3, le=1e6, description="charging: capacity of the battery")] = 15.0
    charge_w: Annotated[Watts, Meta(description="charging: charging power while plugged in")] = 10.0
    day_s: Annotated[Stay, Meta(description="charging: length of a day")] = 86_400.0
    plugged: Annotated[float, Meta(gt=0, lt=1, description="charging: fraction of a day that it is plugged in")] = 0.3
    low: Annotated[float, Meta(ge=0, lt=1, description="charging: battery level below which it is away")] = 0.2
    trace: Annotated[str | None, Meta(description="trace: a file of client<TAB>start<TAB>stop, in seconds")] = None
    bandwidth: Annotated[
        str | None, Meta(description="a file of seconds<TAB>Mbit/s, or a folder of them, for the clients' links")
    ] = None
    repeat: Annotated[bool, Meta(description="whether a trace starts over at its end")] = True


TimeScaleChoice = Annotated[float, Meta(ge=1e-6, le=1e4)] | Literal["auto", "fast"]


class TimingChoice(Profile, frozen=True, kw_only=True):
    """The source of durations; `time_scale` is host seconds per device second.

    `auto` sets it so that tasks are on time; `fast` uses more of the host, and some tasks are late.
    """

    source: TimingSource = "enforced"
    time_scale: TimeScaleChoice = "auto"
    replay: str | None = None


class Evaluation(Profile, frozen=True, kw_only=True):
    """Evaluation after every `every` rounds; the report shows the time to reach each of `targets`.

    They are accuracies from 0 to 1 or, where labels are numbers, mean absolute errors in the unit of the labels.
    `changes` are patterns of weights, such as `layer3.*.conv?.weight`, whose change by each merge of those rounds is
    kept in the run's folder, and with `client_models` so are the models that clients sent for them.
    """

    every: Count = 1
    batch: Batch = 256
    targets: tuple[NonNegative, ...] = ()
    changes: tuple[str, ...] = ()
    client_models: bool = False


class Budgets(Profile, frozen=True, kw_only=True):
    """Limits on the choice of a variant; `memory_margin` is the fraction of the memory cap that is left free."""

    memory_margin: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    round_s: Seconds | None = None
    round_bytes: Positive | None = None
    all_must_fit: bool = False


class Experiment(Profile, frozen=True, kw_only=True):
    """Fleet, data, methods, seeds, policies and timing. Several algorithms, policies or seeds make a study.

    `sweep` lists values for any other keys, by key path, such as `training.optimizer.lr: [0.01, 0.1]`: every
    combination of them makes runs.
    """

    title: str
    fleet: str
    server: ServerChoice = ServerChoice()
    data: Data = Data()
    model: Model = Model()
    training: Training = Training()
    algorithms: Annotated[tuple[AlgorithmChoice, ...], Meta(min_length=1)]
    flower: FlowerApp | None = None
    seeds: Annotated[tuple[Seed, ...], Meta(min_length=1)] = (1,)
    policies: Annotated[tuple[Policy, ...], Meta(min_length=1)] = (Policy(),)
    participation: Participation = Participation()
    availability: Availability = Availability()
    timing: TimingChoice = TimingChoice()
    processes: Processes = "resident"
    rounds: Annotated[int, Meta(ge=1, le=100_000)] = 10
    device_time_limit_s: Seconds | None = None
    evaluation: Evaluation = Evaluation()
    budgets: Budgets = Budgets()
    checkpoint_every: Count = 1
    sweep: dict[str, Annotated[tuple[Any, ...], Meta(min_length=1)]] = {}  # noqa: RUF012 (msgspec copies it)


class RunConfig(Profile, frozen=True, kw_only=True):
    """One run of a study: one algorithm, one policy, one seed. The run stores all of it, including defaults.

    `point` are the values of the sweep that this run has; they are also in `experiment`, which has no sweep itself.
    """

    experiment: Experiment
    algorithm: AlgorithmChoice
    policy: Policy
    seed: int
    point: dict[str, Any] = {}  # noqa: RUF012 (msgspec copies it)

    @property
    def model(self) -> Model:
        """The model of this run: the algorithm's own, or the experiment's."""
        return self.algorithm.model or self.experiment.model

    @property
    def code(self) -> tuple[str, ...]:
        """The names in this run that may be paths of Python files."""
        return (self.model.family, self.algorithm.name, self.policy.kind, self.experiment.data.name)

    @property
    def title(self) -> str:
        """The algorithm's title, with the values of the sweep."""
        return ", ".join(part for part in (self.algorithm.title, point_text(self.point)) if part)

    @property
    def name(self) -> str:
        parts = (self.algorithm.title, self.policy.title, point_text(self.point), str(self.seed))
        return "-".join(part for part in parts if part)


def runs(experiment: Experiment) -> list[RunConfig]:
    """Return every run of the study: algorithms, policies, points of the sweep, and seeds innermost."""
    found = []
    for algorithm in range(len(experiment.algorithms)):
        for policy in range(len(experiment.policies)):
            for point in points(experiment.sweep, algorithm, policy):
                one = at_point(experiment, point) if experiment.sweep else experiment
                found += [
                    RunConfig(
                        experiment=one,
                        algorithm=one.algorithms[algorithm],
                        policy=one.policies[policy],
                        seed=seed,
                        point=point,
                    )
                    for seed in one.seeds
                ]
    return found


def count_runs(experiment: Experiment) -> int:
    """Return the number of runs, without making them."""
    numbers = product(range(len(experiment.algorithms)), range(len(experiment.policies)))
    return len(experiment.seeds) * sum(count_points(experiment.sweep, *each) for each in numbers)


def settings_of(experiment: Experiment) -> list[Experiment]:
    """Return the experiment at every point of its sweep; without one, the experiment itself."""
    if not experiment.sweep:
        return [experiment]
    numbers = product(range(len(experiment.algorithms)), range(len(experiment.policies)))
    found = [at_point(experiment, point) for each in numbers for point in points(experiment.sweep, *each)]
    return list({msgspec.json.encode(one): one for one in found}.values())
