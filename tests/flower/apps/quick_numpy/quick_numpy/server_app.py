"""quick-numpy: a Flower / NumPy app."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    strategy = FedAvg(fraction_evaluate=context.run_config["fraction-evaluate"])
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord([np.zeros((1, 5))]),
        num_rounds=context.run_config["num-server-rounds"],
    )
    print("the final model:", result.arrays.to_numpy_ndarrays()[0].round(3).tolist())
