"""legacy-numpy: a ServerApp with server_fn and a legacy strategy."""

from flwr.common import Context
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg


def weighted(metrics):
    total = sum(examples for examples, _ in metrics)
    return {"accuracy": sum(examples * m["accuracy"] for examples, m in metrics) / total}


def server_fn(context: Context) -> ServerAppComponents:
    strategy = FedAvg(evaluate_metrics_aggregation_fn=weighted)
    return ServerAppComponents(
        strategy=strategy, config=ServerConfig(num_rounds=int(context.run_config["num-server-rounds"]))
    )


app = ServerApp(server_fn=server_fn)
