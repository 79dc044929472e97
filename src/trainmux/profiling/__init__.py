"""A program's kernels: what they touch, and how long they take, measured or worked out for a device."""

from trainmux.profiling._analytic import WidthProfiles, analytic_profile, same_but_for_origin
from trainmux.profiling._branches import (
    branch_width,
    branches_to_measure,
    concurrent_fingerprint,
    fingerprint_of_one,
    known_branches,
    side_by_side,
    used_branches,
)
from trainmux.profiling._cache import ProfileCache
from trainmux.profiling._devices import DEVICES, Device, device_present, find_device
from trainmux.profiling._kernels import KernelGraph, Location, locations_of
from trainmux.profiling._link import LinkRates, probe_link
from trainmux.profiling._measured import MEASUREMENT_VERSION, Measurements, fits, measure_profile
from trainmux.profiling._pass import PassingPlace
from trainmux.profiling._reading import read_kernels, work_of
