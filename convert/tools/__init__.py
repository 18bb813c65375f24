"""The commands inspect, env, families, generate and chat."""
