"""One fleet over the nodes of a Ray cluster: an executor, and an actor on each node. Only functions import ray."""
