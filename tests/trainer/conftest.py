from support.ranks.fixtures import *  # noqa: F403
