"""Commands that look at a checkpoint or use it: inspect, env, generate."""
