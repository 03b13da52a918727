"""troubled: a ServerApp without a strategy, which prints what it gets."""

import json

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


def said(grid, replies):
    nodes = list(grid.get_node_ids())
    return sorted(
        (nodes.index(reply.metadata.src_node_id), reply.error.code if reply.has_error() else 0) for reply in replies
    )


def work(node, seconds):
    content = RecordDict({"config": ConfigRecord({"seconds": seconds})})
    return Message(content=content, dst_node_id=node, message_type="train")


@app.main()
def main(grid: Grid, context: Context) -> None:
    nodes = list(grid.get_node_ids())
    if context.run_config["fails"]:
        raise RuntimeError("no more rounds")
    asked = [Message(content=RecordDict(), dst_node_id=node, message_type="query") for node in nodes]
    print(json.dumps({"query": said(grid, grid.send_and_receive(asked))}))
    # the boards are 10 and 80 times slower than the last one, so that one is alone in time
    late = [work(nodes[0], 0.2), work(nodes[4], 0.2)]
    print(json.dumps({"timeout": said(grid, grid.send_and_receive(late, timeout=1.0))}))
    # who is asked first is not who answers first
    ids = list(grid.push_messages([work(nodes[0], 0.1), work(nodes[4], 0.1)]))
    first = said(grid, grid.pull_messages(ids))
    then = said(grid, grid.pull_messages(ids))
    print(json.dumps({"first": first, "then": then}))
