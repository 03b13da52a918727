"""troubled: clients that fail in every way, each by its number."""

import os
import time

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def query(msg: Message, context: Context) -> Message:
    number = int(context.node_config["partition-id"])
    if number == 1:
        raise ValueError("bad luck")
    if number == 2:
        os._exit(3)
    if number == 3:
        time.sleep(600)
    return Message(content=RecordDict({"metrics": MetricRecord({"number": number})}), reply_to=msg)


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Compute for as long as the message says."""
    end = time.process_time() + float(msg.content["config"]["seconds"])
    while time.process_time() < end:
        pass
    content = RecordDict({"metrics": MetricRecord({"number": int(context.node_config["partition-id"])})})
    return Message(content=content, reply_to=msg)
