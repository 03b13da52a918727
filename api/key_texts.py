"""What each key of the YAML files means, for the schemas and the reference. A test finds a key without a text.

Keys that belong to one kind of their group have their text in the type itself.
"""

from __future__ import annotations

TEXTS: dict[str, dict[str, str]] = {
    "Experiment": {
        "title": "One line for lists, plots and the report.",
        "fleet": "The fleet: a name, or the path of a YAML file.",
        "server": "The server's device and link.",
        "data": "The data set and its partition among the clients.",
        "model": "The model family, and how clients get a variant of it.",
        "training": "What a client does in a round.",
        "algorithms": "The methods to run; each makes runs of its own.",
        "flower": "A Flower app to run instead of algorithms; data, model, training and policies are its own.",
        "seeds": "The seeds; each makes a run of every method and policy. Differences are paired by seed.",
        "policies": "How rounds are ended and stragglers handled; each makes runs of its own.",
        "participation": "How many clients take part in a round, and which.",
        "availability": "When clients can take part, and how fast their links are at which time.",
        "timing": "Where durations come from.",
        "processes": (
            "resident: every client's process lives for the whole run; on-demand: a process per task, for large "
            "fleets; inline: no processes and no limits, for tests; ray: a process per task, on all nodes of a Ray "
            "cluster."
        ),
        "rounds": "The number of rounds. `--resume DIR --set rounds=N` adds some.",
        "device_time_limit_s": "The run ends at this device time even if rounds are left.",
        "evaluation": "When the models are tested. Testing takes no device time.",
        "budgets": "Limits on the choice of a variant.",
        "checkpoint_every": "Merges between two checkpoints.",
        "sweep": "Values for other keys, by key path: every combination makes runs.",
    },
    "FlowerApp": {
        "app": "The folder of the app, as for `flwr run`.",
        "run_config": "Values of the app's own configuration that differ from those in its pyproject.toml.",
        "hang_s": "Seconds on this host after which a call of the ClientApp counts as hung.",
    },
    "ServerChoice": {
        "device": "The device that merges and does the server's part of a method.",
        "link": "The link that all clients share at the server.",
    },
    "Data": {
        "name": "A shipped set, one of torchvision, or the path of your own .npz or .py file.",
        "root": "The folder of torchvision's files; default: one in your home.",
        "download": "Whether a set that is not there is downloaded.",
        "partition": "How samples are divided among the clients.",
        "image_size": "Images are resized to this height and width.",
        "channels": "Images are converted to this number of channels.",
        "normalise": "Whether values are shifted and scaled to mean 0 and deviation 1.",
        "augment": "Random changes of training images.",
        "train_limit": "At most so many training samples are used.",
        "test_limit": "At most so many test samples are used.",
        "public": "Training samples that the server has for itself, for methods that need them.",
        "tokens": "Texts are cut or filled to this number of words.",
        "vocabulary": "The number of words that are told apart.",
    },
    "Partition": {
        "kind": (
            "iid: at random; dirichlet: unequal mixtures of classes; shards: a few classes each; contiguous: in "
            "the order of the set; column: by users; file: as a file says."
        ),
        "alpha": "dirichlet: a smaller value makes clients more different.",
        "min_size": "dirichlet: the least number of samples of a client.",
        "classes_per_client": "shards: the number of classes of a client.",
        "column": "column: who a sample belongs to, such as `user`; a client has the samples of one of them or more.",
        "file": "file: a JSON file as `fleetbed data partition` writes it.",
        "halved": "The share of the clients that keep only half of their training samples, drawn at random.",
    },
    "Model": {
        "family": "A family of `fleetbed models list`, or the path of your own .py file.",
        "variants": "Only these variants; default: all of the family.",
        "assign": (
            "Fix the variants as papers do: the clients, in order, are divided into as many groups, one for each "
            "variant."
        ),
        "choose": (
            "per-method: the largest variant that fits under the run's own method; common: one that fits under "
            "every method of the experiment."
        ),
        "options": "The options of the family.",
    },
    "Training": {
        "batch": "Samples in a step.",
        "epochs": "Passes over a client's samples in a round.",
        "max_steps": "At most so many steps in a round.",
        "optimizer": "The optimiser of the clients.",
        "schedule": "Changes of the learning rate at given rounds.",
        "on_divergence": "Whether a run continues when a loss, a result or the server's model is no longer finite.",
    },
    "Optimizer": {
        "name": "The optimiser.",
        "lr": "The learning rate.",
        "momentum": "sgd: the momentum.",
        "weight_decay": "The weight decay.",
        "decay_biases": "Whether parameters with `bias` in their name decay too.",
    },
    "LearningRate": {
        "round": "The first round with this rate; rounds count from 1.",
        "lr": "The learning rate from then on.",
    },
    "AlgorithmChoice": {
        "name": "A method of `fleetbed methods`, or the path of your own .py file.",
        "params": "The method's parameters; `fleetbed methods NAME` lists them.",
        "label": "Another name for plots and folders, to tell two settings of one method apart.",
        "variant": "Every client trains this variant, whether it fits or not.",
        "model": "A model for this algorithm in place of the experiment's.",
    },
    "Policy": {
        "kind": (
            "sync: wait for all; deadline: until a time; over-select: the first of more; async: merge each "
            "result; buffered: merge several; or the path of your own .py file."
        ),
        "label": "Another name for plots and folders, to tell two settings of one kind apart.",
    },
    "Participation": {
        "ratio": "The part of the fleet that takes part in a round.",
        "last_ratio": "The part of the fleet in the last round.",
        "selection": (
            "uniform: from all clients; available: from those that are there; tier: from clients of one speed."
        ),
        "tiers": "tier: the number of groups by speed.",
    },
    "Availability": {
        "kind": "always; on-off at random; charging by day and night; or as a trace says.",
    },
    "TimingChoice": {
        "source": (
            "enforced: real processes paced to the device's plan; modelled: the plan, at full speed; metered: counted "
            "operators and CPU time, for Flower apps; replay: as recorded in another run."
        ),
        "time_scale": (
            "enforced: host seconds per device second; auto keeps tasks on time; fast uses more of the host."
        ),
        "replay": "replay: the folder of the recorded run.",
    },
    "Evaluation": {
        "every": "Rounds between two evaluations.",
        "changes": "Patterns of the weights whose change by each merge of an evaluated round is kept for plots.",
        "client_models": "Keep the models that clients sent for those merges, whose similarity `plot cka` then draws.",
        "batch": "Samples that are tested at once.",
        "targets": (
            "The report shows the time and cost to reach them: accuracies from 0 to 1, or mean absolute errors "
            "where labels are numbers."
        ),
    },
    "Budgets": {
        "memory_margin": "The part of the memory cap that stays free.",
        "round_s": "A variant must take at most so many device seconds a round, transfers included.",
        "round_bytes": "A variant must move at most so many bytes a round.",
        "all_must_fit": "Whether the experiment is refused if a client cannot train any variant.",
    },
    "Fleet": {
        "title": "One line for lists and reports.",
        "members": "The devices, in the order in which clients are numbered.",
        "total": "The number of clients, if members have weights.",
        "provenance": "Where the mix comes from.",
    },
    "Member": {
        "device": "The device: a name, or the path of a YAML file.",
        "count": "How many of it.",
        "weight": "Its part of the total, in place of count; all weights sum to 1 or 100.",
        "link": "Another link than the device's own.",
        "override": "Figures of the device that differ here, by key path.",
    },
    "Device": {
        "title": "One line for lists and reports.",
        "trains_on": "The unit that trains.",
        "cpu": "The CPU.",
        "gpu": "The GPU, if there is one.",
        "memory": "The memory and its bandwidth.",
        "runtime": "The training software, which takes part of the memory.",
        "rates": "Training rates by class of operation; derived from CPU and memory if they are missing.",
        "power": "Power at the wall.",
        "link": "The name of the default link.",
        "link_override": "The rates that this device reaches on its default link.",
        "train_scale": "The planned time is multiplied by it, if training was measured on the device.",
        "throttle": "Thermal throttling.",
        "provenance": "Where each figure comes from.",
    },
    "Cpu": {
        "description": "The cores, in words.",
        "cores": "The number of cores.",
        "clock_ghz": "The clock.",
        "fp64_gflops": "The rate of a double-precision matrix product on all cores.",
        "fp32_gflops": "The rate of a single-precision matrix product on all cores.",
    },
    "Gpu": {
        "description": "The GPU, in words.",
        "fp32_gflops_peak": "The vendor's peak, used if nothing was measured.",
        "fp32_gflops_sustained": "The measured rate.",
    },
    "Memory": {
        "installed_mib": "What is on the board.",
        "visible_mib": "What the system sees.",
        "available_mib": "What is free for an application.",
        "runtime_mib": "What the training software takes, if it was measured here.",
        "bandwidth_gb_s_peak": "The vendor's peak.",
        "bandwidth_gb_s_measured": "Copying on one core, each byte counted once, as tinymembench does.",
    },
    "Rates": {
        "conv_1x1_gflops": "1x1 convolutions.",
        "conv_gflops": "k x k convolutions, also grouped.",
        "depthwise_gflops": "Depthwise convolutions.",
        "matmul_gflops": "Linear layers, attention, recurrent layers.",
        "memory_gb_s": "Element-wise work, norms, pooling: bytes read and written.",
        "call_us": "The time of each call of an operator besides its work.",
    },
    "Power": {
        "idle_w": "Power while nothing is computed.",
        "load_w": "Power while it trains.",
    },
    "Throttle": {
        "after_s": "Seconds of load after which it begins.",
        "rate": "The speed from then on, as a part of the full one.",
    },
    "LinkOverride": {
        "down_mbit_s": "Rate towards the device.",
        "up_mbit_s": "Rate from the device.",
    },
    "Link": {
        "title": "One line for lists and reports.",
        "down_mbit_s": "Rate towards the device.",
        "up_mbit_s": "Rate from the device.",
        "rtt_ms": "Round-trip time.",
        "jitter_ms": "How much the delay varies.",
        "loss": "The fraction of packets lost.",
        "provenance": "Where each figure comes from.",
    },
    "Provenance": {
        "figure": "The key path of a figure in this file, or of a group of them.",
        "kind": "How the figure was found.",
        "source": "Where it is published.",
        "note": "A remark.",
    },
}
