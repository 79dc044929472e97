"""One member and a batch become a graph; a fused graph becomes forward and backward."""

from trainmux.tracing._batch import BatchSpec, FlatBatch, Text, check_batch, flatten_batch
from trainmux.tracing._composites import RESIZES
from trainmux.tracing._follow import NumberForms, Numbers, follow, same_numbers
from trainmux.tracing._joint import (
    LossFunction,
    Shape,
    TracedGraph,
    TraceSettings,
    trace_forward,
    trace_joint,
)
from trainmux.tracing._number_forms import NUMBER_FORMS
from trainmux.tracing._numbers import (
    Number,
    first_difference,
    number_locations,
    number_name,
    structure_of,
    with_inputs,
)
from trainmux.tracing._passes import (
    SplitGraph,
    arguments_by_name,
    graph_constant,
    inherit_meta,
    move_to,
    output_nodes,
    split_joint,
    written_arguments,
)
from trainmux.tracing._reach import Identity, Place, Reach, memory_span, same_items, tensor_digest
from trainmux.tracing._source import (
    failed_node,
    failure_text,
    innermost_user_frame,
    node_location,
)
from trainmux.tracing._torch_private import (
    FakeTensor,
    FakeTensorMode,
    copy_node,
    functionalized,
    graph_module,
    has_vmap_rule,
    is_plain,
    last_node,
    make_fx,
    nodes_after,
    plain_torch,
    replaced,
    replacing_thread,
    static_fake_mode,
    tracer_graph,
)
