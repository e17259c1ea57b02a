"""Settings that every test shares."""

from hypothesis import HealthCheck, settings

# No deadline: how long one example takes is the machine's business, and wall time is no verdict here.
# print_blob: a failure found by chance is repeated by the line that it prints.
settings.register_profile("kvgate", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvgate")
