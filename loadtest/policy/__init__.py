"""Placement policies against request traces, on simulated engines and a virtual clock: docs/policy-bench.md."""
