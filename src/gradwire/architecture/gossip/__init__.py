"""Gossip: workers average with their neighbours on a graph, and no one holds the model."""

from gradwire.architecture.gossip._algorithm import GossipAlgorithm
from gradwire.core.registry import Registry

GOSSIP = Registry("gossip algorithm", GossipAlgorithm, __name__, group="gradwire.gossip")
