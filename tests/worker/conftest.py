from replica_fixtures import crew, ranks, replicas, service, trained

__all__ = ["crew", "ranks", "replicas", "service", "trained"]
