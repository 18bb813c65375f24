"""The commands inspect, env and generate."""
