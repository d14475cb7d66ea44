"""Communication between ranks: process group, collectives, heartbeat, topology."""
