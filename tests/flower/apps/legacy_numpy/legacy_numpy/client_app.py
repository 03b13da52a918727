"""legacy-numpy: linear regression with a NumPyClient."""

import numpy as np
from flwr.client import Client, ClientApp, NumPyClient
from flwr.common import Context


class LinearClient(NumPyClient):
    def __init__(self, number: int, work_mib: int) -> None:
        rng = np.random.default_rng(number)
        self.x = rng.normal(size=(50, 3))
        self.y = self.x @ np.array([1.0, -2.0, 0.5])
        self.work_mib = work_mib

    def get_parameters(self, config):
        return [np.zeros(3)]

    def fit(self, parameters, config):
        np.ones(self.work_mib << 17)  # what it needs for its work, the same on every board
        w = parameters[0]
        for _ in range(20):
            w = w - 0.1 * self.x.T @ (self.x @ w - self.y) / len(self.y)
        return [w], len(self.y), {"norm": float(np.linalg.norm(w))}

    def evaluate(self, parameters, config):
        error = self.x @ parameters[0] - self.y
        return float(np.mean(error**2)), len(self.y), {"accuracy": float(np.mean(np.abs(error) < 0.5))}


def client_fn(context: Context) -> Client:
    number = int(context.node_config["partition-id"])
    return LinearClient(number, int(context.run_config["work-mib"])).to_client()


app = ClientApp(client_fn=client_fn)
