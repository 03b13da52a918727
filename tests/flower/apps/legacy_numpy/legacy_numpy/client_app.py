"""legacy-numpy: linear regression with a NumPyClient."""

import numpy as np
from flwr.client import Client, ClientApp, NumPyClient
from flwr.common import Context


class LinearClient(NumPyClient):
    def __init__(self, number: int, hungry: bool) -> None:
        rng = np.random.default_rng(number)
        self.x = rng.normal(size=(50, 3))
        self.y = self.x @ np.array([1.0, -2.0, 0.5])
        self.hungry = hungry

    def get_parameters(self, config):
        return [np.zeros(3)]

    def fit(self, parameters, config):
        if self.hungry:
            np.ones(1 << 28)  # 2 GiB, more than most boards have
        w = parameters[0]
        for _ in range(20):
            w = w - 0.1 * self.x.T @ (self.x @ w - self.y) / len(self.y)
        return [w], len(self.y), {"norm": float(np.linalg.norm(w))}

    def evaluate(self, parameters, config):
        error = self.x @ parameters[0] - self.y
        return float(np.mean(error**2)), len(self.y), {"accuracy": float(np.mean(np.abs(error) < 0.5))}


def client_fn(context: Context) -> Client:
    number = int(context.node_config["partition-id"])
    hungry = int(context.node_config["fleetbed.memory-mib"]) < int(context.run_config["hungry-below-mib"])
    return LinearClient(number, hungry).to_client()


app = ClientApp(client_fn=client_fn)
