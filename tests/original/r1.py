"""TensorFlow's r1 ResNets (official/r1/resnet), written out from their description in TensorFlow 1's own layers.

The code itself is in no package that can be installed. These graphs have been compared with it, at the same weights:
the same variables, in the same order, and the same logits bit for bit.
"""

import tensorflow as tf

v1 = tf.compat.v1
SIZES = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
MOMENTUM, EPSILON = 0.997, 1e-5


def resnet(images, *, size, version, num_classes, training, cifar=False):
    """Logits of the network that --resnet_size and --resnet_version name."""
    filters, stages = (16, ((size - 2) // 6,) * 3) if cifar else (64, SIZES[size])
    block = {(False, 1): basic_v1, (False, 2): basic_v2, (True, 1): bottleneck_v1, (True, 2): bottleneck_v2}
    block = block[not cifar and size >= 50, version]
    with v1.variable_scope("resnet_model"):
        x = convolution(images, filters, 3 if cifar else 7, 1 if cifar else 2)
        if version == 1:
            x = tf.nn.relu(norm(x, training))
        if not cifar:
            x = v1.layers.max_pooling2d(x, 3, 2, "SAME")
        for stage, blocks in enumerate(stages):
            for index in range(blocks):
                x = block(x, filters * 2**stage, 2 if stage and not index else 1, index == 0, training)
        if version == 2:
            x = tf.nn.relu(norm(x, training))
        return v1.layers.dense(tf.reduce_mean(x, [1, 2]), num_classes)


def convolution(x, filters, size, stride):
    """Padded by size // 2 on both sides where it has a stride, and as SAME where it has none."""
    if stride > 1:
        x = tf.pad(x, [[0, 0], [size // 2] * 2, [size // 2] * 2, [0, 0]])
    init = v1.variance_scaling_initializer()
    padding = "SAME" if stride == 1 else "VALID"
    return v1.layers.conv2d(x, filters, size, stride, padding, use_bias=False, kernel_initializer=init)


def norm(x, training):
    return v1.layers.batch_normalization(x, momentum=MOMENTUM, epsilon=EPSILON, training=training, fused=True)


def basic_v1(x, filters, stride, project, training):
    shortcut = norm(convolution(x, filters, 1, stride), training) if project else x
    y = tf.nn.relu(norm(convolution(x, filters, 3, stride), training))
    return tf.nn.relu(norm(convolution(y, filters, 3, 1), training) + shortcut)


def bottleneck_v1(x, filters, stride, project, training):
    shortcut = norm(convolution(x, 4 * filters, 1, stride), training) if project else x
    y = tf.nn.relu(norm(convolution(x, filters, 1, 1), training))
    y = tf.nn.relu(norm(convolution(y, filters, 3, stride), training))
    return tf.nn.relu(norm(convolution(y, 4 * filters, 1, 1), training) + shortcut)


def basic_v2(x, filters, stride, project, training):
    y = tf.nn.relu(norm(x, training))
    shortcut = convolution(y, filters, 1, stride) if project else x
    y = tf.nn.relu(norm(convolution(y, filters, 3, stride), training))
    return convolution(y, filters, 3, 1) + shortcut


def bottleneck_v2(x, filters, stride, project, training):
    y = tf.nn.relu(norm(x, training))
    shortcut = convolution(y, 4 * filters, 1, stride) if project else x
    y = tf.nn.relu(norm(convolution(y, filters, 1, 1), training))
    y = tf.nn.relu(norm(convolution(y, filters, 3, stride), training))
    return convolution(y, 4 * filters, 1, 1) + shortcut


def rate(step, *, batch_size, images, base, reference, boundaries, factors, warmup_epochs):
    """The learning rate of a step, learning_rate_with_decay of the original, in float32."""
    batches = images / batch_size
    peak = base * batch_size / reference
    steps = [int(batches * epoch) for epoch in boundaries]
    decayed = v1.train.piecewise_constant(step, steps, [peak * factor for factor in (1.0, *factors)])
    warmup = int(batches * warmup_epochs)
    if not warmup:
        return decayed
    climbing = peak * tf.cast(step, tf.float32) / tf.cast(warmup, tf.float32)
    return tf.cond(step < warmup, lambda: climbing, lambda: decayed)


def train_op(logits, labels, *, learning_rate, weight_decay, decays, step):
    """(operation of one step, loss with L2, [(gradient, variable)])."""
    cross_entropy = v1.losses.sparse_softmax_cross_entropy(logits=logits, labels=labels)
    decayed = [variable for variable in v1.trainable_variables() if decays(variable.name)]
    loss = cross_entropy + weight_decay * tf.add_n([tf.nn.l2_loss(variable) for variable in decayed])
    optimizer = v1.train.MomentumOptimizer(learning_rate, 0.9)
    pairs = optimizer.compute_gradients(loss)
    updates = v1.get_collection(v1.GraphKeys.UPDATE_OPS)
    return tf.group(optimizer.apply_gradients(pairs, step), updates), loss, pairs
