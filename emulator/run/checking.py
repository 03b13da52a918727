"""Checks an experiment piece by piece, so that all of its mistakes are found at once.

`lay_out` refuses a run at its first mistake. Here the same pieces are tried one by one, and the runs are laid out as a
whole only if every piece is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch import Tensor

from fleetbed.emulator.algorithms import load_algorithm, load_method
from fleetbed.emulator.data import Split, divide, open_dataset, prepare_dataset
from fleetbed.emulator.data.sources import DOWNLOADED, root_of
from fleetbed.emulator.data.text import FIRST_WORD
from fleetbed.emulator.engine.layout import check_assign, check_method, check_targets, lay_out, stand_ins
from fleetbed.emulator.method.algorithm import Context
from fleetbed.emulator.run.replay import read_recording
from fleetbed.emulator.timeline.making_policies import check_policy
from fleetbed.emulator.timeline.own_policies import params_type, policy_type
from fleetbed.emulator.timeline.traces import load_presence, load_rates
from fleetbed.models.base import Family, InputSpec
from fleetbed.models.families.lookup import family
from fleetbed.models.plug_ins import strict
from fleetbed.profiles.errors import BadInput, HostCannot
from fleetbed.profiles.experiment import Data, Experiment, Model, Policy, RunConfig, runs, settings_of
from fleetbed.profiles.files import user_path
from fleetbed.profiles.mistakes import Mistakes, convert_on
from fleetbed.profiles.resolve import clients_of, load_device, load_fleet, load_link
from fleetbed.profiles.types import ClientSpec


def check_experiment(experiment: Experiment, search: Sequence[Path], mistakes: Mistakes) -> list[str]:
    """Note everything that is missing or does not fit together; return remarks on what this host lacks."""
    try:
        settings = settings_of(experiment)
    except (BadInput, msgspec.ValidationError):  # a wrong value in the sweep, which is noted already
        settings = [msgspec.structs.replace(experiment, sweep={})]
    found = [remark for one in settings for remark in _check_setting(one, search, mistakes)]
    return list(dict.fromkeys(found))


def _check_setting(experiment: Experiment, search: Sequence[Path], mistakes: Mistakes) -> list[str]:
    attempt = mistakes.attempt
    specs = attempt(lambda: clients_of(load_fleet(experiment.fleet, search, "fleet"), search, experiment.fleet))
    attempt(lambda: load_device(experiment.server.device, search, "server.device"))
    attempt(lambda: load_link(experiment.server.link, search, "server.link"))
    if experiment.flower is not None:
        if specs is not None:
            _check_clients(experiment, specs, mistakes)
        return ["the Flower app is checked when it is run"]
    models = _check_models(experiment, specs, mistakes)
    remarks = _missing(experiment.data)
    spec = attempt(lambda: _known_spec(experiment.data) if remarks else _spec(experiment.data))
    if spec is not None:
        attempt(lambda given=spec: check_targets(experiment.evaluation, given))  # type: ignore[misc]
    if spec is not None and specs is not None and not remarks:
        attempt(lambda: _divided(experiment.data, len(specs), experiment.seeds[0]))
    for model in {id(model): model for model in models if model is not None}.values():
        if spec is not None:
            attempt(lambda whole=model, given=spec: whole.check_input(given))  # type: ignore[misc]
    if specs is not None:
        _check_clients(experiment, specs, mistakes)
    _check_methods(experiment, models, spec, mistakes)
    if not mistakes.sentences and not remarks:
        for config in _representatives(experiment):
            try:
                attempt(lambda config=config: lay_out(config, search))  # type: ignore[misc]
            except HostCannot as error:
                return [str(error)]
    return remarks


def _check_models(
    experiment: Experiment, specs: Sequence[ClientSpec] | None, mistakes: Mistakes
) -> list[Family | None]:
    """The family of each algorithm, None where it is not known; each model is checked once."""
    found: dict[bytes, Family | None] = {}
    families = []
    for algorithm in experiment.algorithms:
        choice = algorithm.model or experiment.model
        key = msgspec.json.encode(choice)
        if key not in found:
            found[key] = _check_model(choice, specs, mistakes)
        model = found[key]
        if model is not None and algorithm.variant is not None:
            mistakes.attempt(lambda m=model, v=algorithm.variant: m.check_variant(v))  # type: ignore[misc]
        families.append(model)
    return families


def _check_model(choice: Model, specs: Sequence[ClientSpec] | None, mistakes: Mistakes) -> Family | None:
    every = mistakes.attempt(lambda: family(choice.family, choice.options))
    model = None if every is None else mistakes.attempt(lambda: every.narrow(choice.variants))
    if model is not None:
        mistakes.attempt(lambda: check_assign(choice, model, None if specs is None else len(specs)))
    return model


def _check_clients(experiment: Experiment, specs: Sequence[ClientSpec], mistakes: Mistakes) -> None:
    """Check the policies and traces, which depend on the number of clients."""
    for number, policy in enumerate(experiment.policies):
        where = f"policies.{number}"
        params = mistakes.attempt(lambda p=policy, w=where: params_type(p, w))  # type: ignore[misc]
        if params is not None:  # all mistakes of its parameters, of which check_policy would raise the first
            convert_on(policy.params, params, f"the parameters of {policy.kind}", mistakes, f"{where}.params")
        mistakes.attempt(lambda p=policy, w=where: check_policy(experiment, p, len(specs), w))  # type: ignore[misc]
    mistakes.attempt(lambda: load_presence(experiment, len(specs)))
    mistakes.attempt(lambda: load_rates(experiment, len(specs), experiment.seeds[0]))


def _check_methods(
    experiment: Experiment, models: Sequence[Family | None], spec: InputSpec | None, mistakes: Mistakes
) -> None:
    """Names and parameters in any case; what goes with which policy, model and data where these are known."""
    sound = [policy for policy in experiment.policies if _is_sound(policy)]
    for number, (choice, model) in enumerate(zip(experiment.algorithms, models, strict=True)):
        known = model is not None and spec is not None
        whole = model or family("resnet-stage")
        assigned = (choice.model or experiment.model).assign if choice.variant is None else (choice.variant,)
        context = Context(
            seed=experiment.seeds[0],
            spec=spec or InputSpec((3, 32, 32), 10),
            family=whole,
            clients=tuple(stand_ins(whole, assigned)),
            training=experiment.training,
            rounds=experiment.rounds,
            public=_CountedSamples(experiment.data.public) if experiment.data.public else None,
        )
        where = f"algorithms.{number}"
        module = mistakes.attempt(lambda c=choice, w=where: load_algorithm(c.name, w))  # type: ignore[misc]
        if module is not None:  # all mistakes of its parameters, of which load_method would raise the first
            convert_on(
                choice.params, strict(module.Params), f"the parameters of {choice.name}", mistakes, f"{where}.params"
            )
        method = mistakes.attempt(lambda n=number, c=choice, k=context: load_method(c, k, f"algorithms.{n}"))  # type: ignore[misc]
        for config in [c for c in _representatives(experiment) if c.algorithm is choice and method is not None]:
            if known and config.policy in sound:
                mistakes.attempt(lambda c=config, m=method: check_method(c, m))  # type: ignore[misc]
            replay = experiment.timing.replay
            if replay is not None:
                folder = user_path(replay, "timing.replay")
                mistakes.attempt(lambda c=config, f=folder: read_recording(f, c))  # type: ignore[misc]


def _is_sound(policy: Policy) -> bool:
    """Return whether there is such a policy; if not, that is noted already."""
    try:
        return bool(policy_type(policy))
    except BadInput:
        return False


def _representatives(experiment: Experiment) -> Iterator[RunConfig]:
    """Yield runs with every method under every policy, and with every seed, but not all combinations."""
    first_seed, first, policy = experiment.seeds[0], experiment.algorithms[0], experiment.policies[0]
    for config in runs(experiment):
        if config.seed == first_seed or (config.algorithm is first and config.policy is policy):
            yield config


@dataclass(frozen=True)
class _CountedSamples:
    """Stands for the server's samples while only their number is known."""

    count: int

    def __len__(self) -> int:
        return self.count

    def draw(self, count: int, seed: int) -> Tensor:
        raise AssertionError(f"{count} samples for {seed} were drawn while an experiment was checked")

    labels = draw

    def with_labels(self) -> _CountedSamples:
        return self


def _missing(data: Data) -> list[str]:
    """Return a remark if a named data set is not on this host: a check downloads nothing."""
    known = DOWNLOADED.get(data.name)
    if known is None or known.missing(root_of(data)) is None:
        return []
    return [f"{data.name} is not in {root_of(data)}, so the partition of its samples was not checked"]


def _known_spec(data: Data) -> InputSpec:
    known = DOWNLOADED[data.name]
    if known.shape is None:
        return InputSpec((data.tokens,), known.classes, FIRST_WORD + data.vocabulary)
    channels, height, width = known.shape
    return InputSpec((data.channels or channels, data.image_size or height, data.image_size or width), known.classes)


def _spec(data: Data) -> InputSpec:
    return open_dataset(prepare_dataset(data)).spec


def _divided(data: Data, clients: int, seed: int) -> Split:
    return divide(open_dataset(prepare_dataset(data)), data, clients, seed)
