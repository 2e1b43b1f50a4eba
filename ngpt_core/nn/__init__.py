"""The forward pass. Each file answers one question; ``model.py`` puts them together.

unit        which parameters live on the sphere           scale      trained scales and their units (s_init, s_scale)
residual    how a block moves the hidden state            embedding  where it starts
attention   how tokens look at each other                 mamba2     the state-space layer; ssd: its scan
mlp         the feed-forward block                        moe        the mixture of experts; grouped: its products
head        logits, s_z and LGP; loss: in chunks          model      the whole model
documents   where packed documents begin and end
generate    how a text is continued                       io         saving and loading
product     which library multiplies on a CPU
precision   where autocast must not round              fused      when an operator in C++ is taken (..._cpu)
transforms  our operators under torch.func                stream     a file of tensors, one after the other
"""
