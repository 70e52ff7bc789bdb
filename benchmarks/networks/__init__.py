"""What the benchmark trains: architectures by name, and those of them that torchvision does not have."""

from .architectures import ARCHITECTURES, PUBLISHED, Architecture, Published, listed
from .inputs import Images, Tokens, Vectors
from .search_space import NETWORKS, FactorisedReduce, SearchSpaceNetwork

__all__ = [
    "ARCHITECTURES",
    "NETWORKS",
    "PUBLISHED",
    "Architecture",
    "FactorisedReduce",
    "Images",
    "Published",
    "SearchSpaceNetwork",
    "Tokens",
    "Vectors",
    "listed",
]
