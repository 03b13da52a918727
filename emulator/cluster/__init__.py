"""Beyond one machine: connects to Ray and examines its nodes. Only functions in here import ray."""
