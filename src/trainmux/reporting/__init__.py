"""Records become text, pages and traces; reads ``ir`` only."""

from trainmux.reporting._fusion_text import format_fusion
from trainmux.reporting._page import NUMBER, SHORT, TEXT, Cell
from trainmux.reporting._plan_page import plan_page
from trainmux.reporting._plan_text import plan_text
from trainmux.reporting._search_page import Chart, Section, search_page
from trainmux.reporting._trace import chrome_trace
from trainmux.reporting._units import counted
