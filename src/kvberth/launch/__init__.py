"""Local clusters: prefill workers, decode workers and router as processes of this machine."""

from kvberth.launch.cluster import LocalCluster
from kvberth.launch.demo_model import DemoModelError, demo_model
from kvberth.launch.engine import EngineProcess
from kvberth.launch.nursery import Nurseries
from kvberth.launch.place import Place
from kvberth.launch.ports import PortLease
from kvberth.launch.process import LaunchError, ManagedProcess
from kvberth.launch.settings import ClusterSettings, Connector

__all__ = [
    "ClusterSettings",
    "Connector",
    "DemoModelError",
    "EngineProcess",
    "LaunchError",
    "LocalCluster",
    "ManagedProcess",
    "Nurseries",
    "Place",
    "PortLease",
    "demo_model",
]
