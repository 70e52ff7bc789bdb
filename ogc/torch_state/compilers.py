"""Names of torch's compilers that begin with an underscore: what each gives, and what fails without it.

They stand apart from :mod:`ogc.torch_state.private` as their import takes a second, which only who compiles shall pay.
"""

from __future__ import annotations

from typing import Any

import torch._dynamo.backends.common
import torch._dynamo.backends.debugging
import torch._functorch.partitioners
import torch._inductor.compile_fx
import torch._inductor.custom_graph_pass
import torch._inductor.fx_passes.control_dependencies
import torch._inductor.inductor_prims
import torch.utils._ordered_set

partition_in_order: Any = torch._functorch.partitioners.default_partition
"""Cuts a joint graph behind the last node of its forward. Without it a planned joint graph is not divided."""
CustomPartitioner: Any = torch._inductor.custom_graph_pass.CustomPartitionerFn
"""The class that Inductor wants a partitioner to be of. Without it Inductor takes none."""
hash_of_files: Any = torch._inductor.custom_graph_pass.get_hash_for_files
"""What Inductor's caches know code by. Without it they would return what an older plan compiled."""
hold_order: Any = torch._inductor.fx_passes.control_dependencies.preserve_node_ordering
"""Lets nodes wait for others that they do not read. Without it a scheduler recomputes earlier than planned."""
OrderedSet: Any = torch.utils._ordered_set.OrderedSet
"""The sets that :data:`hold_order` takes. Without it as without that."""
compile_by_inductor: Any = torch._inductor.compile_fx.compile_fx
"""What torch.compile calls. Without it planned graphs are not compiled."""
aot_autograd: Any = torch._dynamo.backends.common.aot_autograd
"""Traces forward and backward into one graph. Without it backend="ogc" has nothing to plan."""
run_as_it_is: Any = torch._dynamo.backends.debugging.boxed_nop
"""Runs a graph operator by operator and lets go of inputs. Without it the backend keeps all that was saved."""
prims: Any = torch.ops.prims
"""Operators, Inductor's own among them. Without these random numbers in compiled code count as saved."""
