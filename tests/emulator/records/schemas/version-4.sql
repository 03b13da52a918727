CREATE TABLE meta (
    key TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (key)
);
CREATE TABLE clients (
    client INTEGER NOT NULL,
    name TEXT NOT NULL,
    device TEXT NOT NULL,
    device_title TEXT NOT NULL,
    link TEXT NOT NULL,
    variant TEXT,
    reason TEXT NOT NULL,
    memory_predicted_bytes INTEGER,
    memory_cap_bytes INTEGER NOT NULL,
    rate_gflops REAL NOT NULL,
    slowdown REAL,
    load_w REAL,
    idle_w REAL,
    samples INTEGER NOT NULL,
    test_samples INTEGER NOT NULL,
    label_counts TEXT NOT NULL,
    PRIMARY KEY (client)
);
CREATE TABLE caps (
    client INTEGER NOT NULL,
    knob TEXT NOT NULL,
    status TEXT NOT NULL,
    backend TEXT NOT NULL,
    asked REAL,
    got REAL,
    unit TEXT NOT NULL,
    note TEXT NOT NULL,
    PRIMARY KEY (client, knob)
);
CREATE TABLE rounds (
    version INTEGER NOT NULL,
    round INTEGER NOT NULL,
    stage TEXT NOT NULL,
    device_start_s REAL NOT NULL,
    device_end_s REAL NOT NULL,
    server_s REAL NOT NULL,
    host_start_s REAL NOT NULL,
    host_end_s REAL NOT NULL,
    merged INTEGER NOT NULL,
    PRIMARY KEY (version)
);
CREATE TABLE tasks (
    task INTEGER NOT NULL,
    client INTEGER NOT NULL,
    round INTEGER NOT NULL,
    stage TEXT NOT NULL,
    variant TEXT NOT NULL,
    outcome TEXT NOT NULL,
    detail TEXT NOT NULL,
    base_version INTEGER NOT NULL,
    merged_version INTEGER,
    staleness INTEGER,
    dispatched_s REAL NOT NULL,
    downloaded_s REAL,
    compute_start_s REAL,
    compute_end_s REAL,
    uploaded_s REAL,
    ended_s REAL,
    waited_s REAL,
    host_queued_s REAL NOT NULL,
    host_start_s REAL,
    host_end_s REAL,
    plan_s REAL NOT NULL,
    time_scale REAL,
    measured_s REAL,
    overrun REAL,
    cpu_s REAL,
    throttled_s REAL,
    peak_bytes INTEGER,
    anon_bytes INTEGER,
    cap_bytes INTEGER NOT NULL,
    gpu_peak_bytes INTEGER,
    gpu_w REAL,
    plan_flops REAL,
    flops REAL NOT NULL,
    bytes_down INTEGER NOT NULL,
    bytes_up INTEGER,
    joules REAL,
    steps INTEGER,
    samples INTEGER,
    loss REAL,
    PRIMARY KEY (task)
);
CREATE TABLE evaluations (
    version INTEGER NOT NULL,
    round INTEGER NOT NULL,
    device_s REAL NOT NULL,
    target TEXT NOT NULL,
    variant TEXT NOT NULL,
    client INTEGER,
    local INTEGER NOT NULL,
    samples INTEGER NOT NULL,
    accuracy REAL,
    loss REAL,
    f1 REAL,
    mae REAL,
    PRIMARY KEY (version, target)
);
CREATE TABLE metrics (
    version INTEGER NOT NULL,
    task INTEGER,
    name TEXT NOT NULL,
    value REAL
);
CREATE TABLE notices (
    host_s REAL NOT NULL,
    device_s REAL,
    kind TEXT NOT NULL,
    text TEXT NOT NULL
);
