"""What engines tell of their KV caches: found, subscribed to, kept in order, and handed to the index."""

from router.kv_events.intake import KvEventIntake
from router.kv_events.rank_feed import Applied, FeedState, FrameSink
from router.kv_events.settings import IntakeSettings

__all__ = ["Applied", "FeedState", "FrameSink", "IntakeSettings", "KvEventIntake"]
