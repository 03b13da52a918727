"""Policies of a user's own: a file, or an entry point in the group `fleetbed.policies`, with Params and Policy.

`Params` is a frozen msgspec type, as methods have one. `Policy` derives from `Rounds` or `Stream` and defines some of
their hooks; its fields are its state, which a checkpoint holds. All of its code runs behind a guard that checks what it
returns and says where it fails.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from math import isfinite
from typing import Any, Final

import msgspec
from msgspec import Struct

from fleetbed.emulator.method.failures import CodeFailed, named
from fleetbed.emulator.timeline.policies import AnyPolicy, Rounds, Stream
from fleetbed.models.plug_ins import PlugIn, find_plug_in, outside, strict
from fleetbed.profiles.errors import BadInput, nearest
from fleetbed.profiles.experiment import Policy, PolicyKind
from fleetbed.profiles.explain import explain
from fleetbed.profiles.files import title_of

GROUP: Final = "fleetbed.policies"
PolicyType = type[Rounds] | type[Stream]
KINDS: Final[dict[PolicyKind, PolicyType]] = {
    "sync": Rounds,
    "deadline": Rounds,
    "over-select": Rounds,
    "async": Stream,
    "buffered": Stream,
}
_BOTH: Final = ("start", "invite", "on_result")
HOOKS: Final[dict[PolicyType, tuple[str, ...]]] = {
    Rounds: (*_BOTH, "timer_s", "is_complete"),
    Stream: (*_BOTH, "weight"),
}


class NoParams(Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of a policy that has none."""


class _Stored(Struct):
    policy: Policy


def policy_names() -> tuple[str, ...]:
    """Return the names of fleetbed's own policies and of those that other packages bring. Nothing is imported."""
    return (*KINDS, *outside(GROUP))


def is_own(policy: Policy) -> bool:
    """Return whether the policy is a user's."""
    return policy.kind not in KINDS


def policy_type(policy: Policy, where: str = "policy") -> PolicyType:
    """Return the type that carries a policy out. `where` is the key path of the choice, for the error."""
    for kind, known in KINDS.items():
        if policy.kind == kind:
            return known
    found = _find(policy, where)
    kind = found.get("Policy")
    base = next((base for base in HOOKS if isinstance(kind, type) and issubclass(kind, base)), None)
    if base is None:
        raise BadInput(
            f"{found.source} has no Policy: a policy defines one, a class that derives from fleetbed.Rounds or "
            f"fleetbed.Stream."
        )
    taken = _taken(kind, base)
    if taken:
        raise BadInput(
            f"{found.source} has a Policy with {taken[0]}, which belongs to fleetbed.{base.__name__}: a policy may "
            f"define {', '.join(HOOKS[base])}, and fields and methods with other names."
        )
    return _guarded(kind, base, _who(policy))


def works_like(policy: Policy) -> PolicyKind:
    """Return the policy of fleetbed that decides which methods can run under this one."""
    for kind in KINDS:
        if policy.kind == kind:
            return kind
    return "sync" if issubclass(policy_type(policy), Rounds) else "async"


def params_type(policy: Policy, where: str = "policy") -> type[Struct]:
    """Return the type of a policy's parameters."""
    if not is_own(policy):
        return NoParams
    found = _find(policy, where)
    kind = found.get("Params")
    if kind is None:
        return NoParams
    if not (isinstance(kind, type) and issubclass(kind, Struct)):
        raise BadInput(f"{found.source} has Params that cannot be used: it must be a Struct of msgspec.")
    return strict(kind)


def read_params(policy: Policy, where: str = "policy") -> Struct:
    """Return the parameters of a policy as its own type."""
    kind = params_type(policy, where)
    try:
        return msgspec.convert(policy.params, kind)
    except msgspec.ValidationError as error:
        at = f"the parameters of {policy.kind}"
        raise explain(error, policy.params, kind, at, f"{where}.params") from None


def restored(tree: Any) -> AnyPolicy:
    """Return the policy that a checkpoint holds as plain data."""
    choice = msgspec.convert(tree, _Stored).policy
    policy = msgspec.convert(tree, policy_type(choice), str_keys=True)
    if is_own(choice):
        policy.params = read_params(choice)
    return policy


def check_state(policy: AnyPolicy) -> None:
    """Refuse a state of a user's policy that would not be the same after it was stored and read."""
    if not is_own(policy.policy):
        return
    assert isinstance(policy, Struct)
    who = _who(policy.policy)
    advice = "give the field a type such as int, float, str, list[int] or dict[int, float], and only such values"
    for field in policy.__struct_fields__:
        try:
            msgspec.json.encode(getattr(policy, field))
        except (TypeError, ValueError, RecursionError) as error:
            raise CodeFailed(f"{who} has the field {field}, which cannot be stored: {error}; {advice}") from error
    try:
        again = restored(msgspec.json.decode(msgspec.json.encode(policy)))
    except msgspec.ValidationError as error:
        raise CodeFailed(f"{who} has a field whose value does not have its type: {error}; {advice}") from error
    for field in policy.__struct_fields__:
        if (before := getattr(policy, field)) != (after := getattr(again, field)):
            raise CodeFailed(
                f"{who} has the field {field}, which is {before!r:.80} and would be {after!r:.80} after it was stored; "
                f"{advice}"
            )


def _find(policy: Policy, where: str) -> PlugIn:
    found = find_plug_in(GROUP, policy.kind, f"{where}.kind")
    if found is None:
        raise nearest(policy.kind, policy_names(), "policy", f"{where}.kind")
    return found


def _who(policy: Policy) -> str:
    return f"the policy {title_of(policy.kind)}"


def _taken(kind: type, base: PolicyType) -> list[str]:
    """Return the names of a user's class that already mean something else."""
    theirs = kind.__mro__[: kind.__mro__.index(base)]
    names = {name for each in theirs for name in (*vars(each), *vars(each).get("__annotations__", ()))}
    allowed = {*HOOKS[base], "params"}
    return sorted(name for name in names if hasattr(base, name) and name not in allowed and not name.startswith("__"))


@lru_cache(maxsize=64)
def _guarded(kind: PolicyType, base: PolicyType, who: str) -> PolicyType:
    """Return the same type with every hook behind a guard."""
    hooks = {name: _guard(name, getattr(kind, name), who) for name in HOOKS[base]}
    guarded: PolicyType = msgspec.defstruct(kind.__name__, [], bases=(kind,), namespace=hooks, module=kind.__module__)  # type: ignore[assignment]
    return guarded


def _guard(name: str, hook: Callable[..., Any], who: str) -> Callable[..., Any]:
    check = _CHECKS.get(name)

    @wraps(hook)
    def call(self: Any, *given: Any) -> Any:
        with named(who, name):
            found = hook(self, *given)
            problem = None
            if check is not None:
                found, problem = check(self, found, *given)
        if problem:
            raise CodeFailed(f"{who} failed: {name} returned {found!r:.100}, but {problem}")
        return found

    return call


def _check_invited(policy: Rounds | Stream, found: Any, candidates: Sequence[int], count: int) -> tuple[Any, str]:
    try:
        chosen = [operator.index(client) for client in found]
    except TypeError:
        return found, "a list of clients' numbers is needed"
    if len({*chosen}) < len(chosen) or not {*chosen} <= {*candidates}:
        return found, f"only candidates can be invited, each once; they are {list(candidates)!r:.100}"
    if isinstance(policy, Stream) and len(chosen) > count:
        return found, f"at most {count} can be invited now, because concurrency is {policy.concurrency}"
    if not chosen and not (isinstance(policy, Stream) and policy.busy):
        return found, "at least one client is needed, or nothing would ever happen again"
    return chosen, ""


def _check_timer(policy: Any, found: Any) -> tuple[Any, str]:
    del policy
    if found is None:
        return found, ""
    return _number(found, lambda seconds: seconds > 0, "a number of seconds above 0, or None")


def _check_weight(policy: Any, found: Any, staleness: int) -> tuple[Any, str]:
    del policy, staleness
    return _number(found, lambda weight: weight >= 0, "a finite number from 0")


def _number(found: Any, is_right: Callable[[float], bool], wanted: str) -> tuple[Any, str]:
    try:
        number = float(found)
    except (TypeError, ValueError):
        return found, f"{wanted} is needed"
    return (number, "") if isfinite(number) and is_right(number) else (found, f"{wanted} is needed")


#: what a hook returned, converted, and what is wrong with it, if anything
_CHECKS: Final[dict[str, Callable[..., tuple[Any, str]]]] = {
    "invite": _check_invited,
    "timer_s": _check_timer,
    "weight": _check_weight,
}
