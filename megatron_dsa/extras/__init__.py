"""Commands of ``python -m megatron_dsa``: doctor, planner, report, tables."""
