"""quick-numpy: a Flower / NumPy app."""

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on local data."""
    weights = msg.content["arrays"].to_numpy_ndarrays()[0]
    calls = int(context.state["calls"]["count"]) + 1 if "calls" in context.state else 1
    context.state["calls"] = ConfigRecord({"count": calls})
    number = int(context.node_config["partition-id"])
    weights = weights + number + np.random.random(weights.shape)
    metrics = {"random_metric": float(np.random.random()), "num-examples": 1 + number, "calls": calls}
    content = RecordDict({"arrays": ArrayRecord([weights]), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the model on local data."""
    weights = msg.content["arrays"].to_numpy_ndarrays()[0]
    metrics = {
        "eval_loss": float(weights.mean()),
        "eval_acc": float(context.node_config["partition-id"]) / int(context.node_config["num-partitions"]),
        "memory": int(context.node_config["fleetbed.memory-mib"]),
        "num-examples": 1,
    }
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
