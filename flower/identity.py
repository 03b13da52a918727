"""Who sends a message, by Flower's rules: messages carry the ids of the run and the node whose code makes them."""

from __future__ import annotations

import time
from contextlib import suppress

from flwr.app import Message

from fleetbed.emulator.randomness import derive

RUN_ID = 1
SERVER_NODE = 1  # as in Flower


def node_ids(seed: int, clients: int) -> list[int]:
    """The node id of each client, the same for every run with this seed."""
    return [derive(seed, "flower node", number) | 1 << 40 for number in range(clients)]


def set_for(node_id: int) -> None:
    """Tell Flower who the code of this process is; versions before it asked for that need nothing."""
    with suppress(ImportError):
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.task_id = TaskIdentity.run_id = RUN_ID
        TaskIdentity.node_id = node_id


def name(message: Message, message_id: str) -> None:
    """Give a message what Flower's server would give it. It counts as new: its age is a matter of device time."""
    told = message.metadata.__dict__
    told["_message_id"], told["_run_id"], told["_src_node_id"] = message_id, RUN_ID, SERVER_NODE
    message.metadata.created_at = time.time()
