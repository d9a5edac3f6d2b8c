"""Reinforcement learning: rollouts, replayed selections, agreement of log-probabilities."""
