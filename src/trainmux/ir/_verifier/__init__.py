"""The verifier: proves a program from profiles and instructions alone. Shares no code with planners."""

from trainmux.ir._verifier._proof import find_violations, verify
from trainmux.ir._verifier._report import Violation, ViolationKind
