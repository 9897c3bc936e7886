"""Every test runs on 8 virtual CPU devices in float32; nothing is skipped for want of hardware."""

import jax
import pytest

DEVICES = 8

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", DEVICES)


@pytest.fixture(scope="session", autouse=True)
def devices():
    """The 8 virtual devices the suite is written for."""
    found = jax.devices()
    assert len(found) == DEVICES, f"the tests need {DEVICES} CPU devices, found {found}"
    return found
