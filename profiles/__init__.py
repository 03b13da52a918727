"""Types of devices, links, fleets and experiments, and the code that reads them from YAML."""

from fleetbed.profiles.errors import BadInput, FleetbedError, HostCannot, nearest
from fleetbed.profiles.experiment import Experiment, RunConfig, runs
from fleetbed.profiles.resolve import (
    available,
    clients_of,
    load_device,
    load_experiment,
    load_fleet,
    load_link,
)
from fleetbed.profiles.types import ClientSpec, Device, Fleet, Link, Member, Provenance

__all__ = [
    "BadInput",
    "ClientSpec",
    "Device",
    "Experiment",
    "Fleet",
    "FleetbedError",
    "HostCannot",
    "Link",
    "Member",
    "Provenance",
    "RunConfig",
    "available",
    "clients_of",
    "load_device",
    "load_experiment",
    "load_fleet",
    "load_link",
    "nearest",
    "runs",
]
