"""Measuring: workloads, comparisons in one process, records. Only `offline` touches the engine."""
