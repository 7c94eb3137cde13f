package example;

import com.google.protobuf.Any;
import com.google.protobuf.Duration;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.ChannelCredentials;
import io.grpc.Context;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.MetadataUtils;
import java.io.File;
import java.io.IOException;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.concurrent.TimeUnit;
import tokasaurus.common.v1.SamplingOuterClass.Sampling;
import tokasaurus.scheduler.v1.Generate.GenerateRequest;
import tokasaurus.scheduler.v1.Generate.GenerateResponse;
import tokasaurus.scheduler.v1.Generate.SampleOutput;
import tokasaurus.scheduler.v1.Generate.Stopping;
import tokasaurus.scheduler.v1.Observe.GetModelRequest;
import tokasaurus.scheduler.v1.Observe.Model;
import tokasaurus.scheduler.v1.SchedulerServiceGrpc;
import tokasaurus.scheduler.v1.SchedulerServiceGrpc.SchedulerServiceBlockingStub;

/**
 * Streams, cancels, sets a deadline and reads errors: {@code Client [HOST:PORT]}.
 *
 * <p>TOKA_API_KEY: a key. TOKA_GRPC_CA: TLS; with TOKA_GRPC_CERT and TOKA_GRPC_KEY, mTLS. All three name PEM files.
 */
public final class Client {
  private static final String PROMPT =
      "Question: Tom buys 3 books for $7 each and 4 pens for $2 each. How much does he pay?\nAnswer:";
  private static final long PATIENCE_MS = 60_000;
  private static final PrintStream OUT = new PrintStream(System.out, true, StandardCharsets.UTF_8);

  private final SchedulerServiceBlockingStub stub;

  private Client(SchedulerServiceBlockingStub stub) {
    this.stub = stub;
  }

  public static void main(String[] arguments) throws Exception {
    String address = arguments.length > 0 ? arguments[0] : "127.0.0.1:10310";
    ManagedChannel channel =
        Grpc.newChannelBuilder(address, credentials())
            .keepAliveTime(30, TimeUnit.SECONDS)
            .keepAliveTimeout(10, TimeUnit.SECONDS)
            .maxInboundMessageSize(64 << 20)
            .build();
    int exitStatus = 0;
    try {
      Client client = new Client(withKey(SchedulerServiceGrpc.newBlockingStub(channel)));
      client.showModel();
      client.stream();
      client.cancel();
      client.deadline();
      client.beRefused();
    } catch (StatusRuntimeException failure) {
      report(new PrintStream(System.err, true, StandardCharsets.UTF_8), failure);
      exitStatus = 1;
    } finally {
      channel.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
    }
    System.exit(exitStatus);
  }

  private static ChannelCredentials credentials() throws IOException {
    String ca = System.getenv("TOKA_GRPC_CA");
    if (ca == null) {
      return InsecureChannelCredentials.create();
    }
    TlsChannelCredentials.Builder tls = TlsChannelCredentials.newBuilder().trustManager(new File(ca));
    String cert = System.getenv("TOKA_GRPC_CERT");
    if (cert != null) {
      tls.keyManager(new File(cert), new File(System.getenv("TOKA_GRPC_KEY")));
    }
    return tls.build();
  }

  private static SchedulerServiceBlockingStub withKey(SchedulerServiceBlockingStub stub) {
    String key = System.getenv("TOKA_API_KEY");
    if (key == null) {
      return stub;
    }
    Metadata headers = new Metadata();
    headers.put(Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER), "Bearer " + key);
    return stub.withInterceptors(MetadataUtils.newAttachHeadersInterceptor(headers));
  }

  private SchedulerServiceBlockingStub within(long milliseconds) {
    return stub.withDeadlineAfter(milliseconds, TimeUnit.MILLISECONDS);
  }

  private void showModel() {
    Model model = within(PATIENCE_MS).getModel(GetModelRequest.getDefaultInstance()).getModel();
    OUT.printf(
        "model: %s, contract %s, %d tokens of context%n",
        model.getId(), model.getContractVersion(), model.getMaxContextTokens());
  }

  /** Text as it comes. The first message accepts the request; the last of a sample has its finish. */
  private void stream() {
    GenerateRequest request =
        GenerateRequest.newBuilder()
            .setText(PROMPT)
            .setSampling(Sampling.newBuilder().setTemperature(0))
            .setStopping(Stopping.newBuilder().setMaxTokens(100))
            .build();
    Iterator<GenerateResponse> messages = within(PATIENCE_MS).generate(request);
    while (messages.hasNext()) {
      GenerateResponse message = messages.next();
      if (message.hasAccepted()) {
        OUT.printf("accepted: %d prompt tokens%nanswer:", message.getAccepted().getPromptTokens());
      }
      for (SampleOutput sample : message.getOutputs().getSamplesList()) {
        OUT.print(sample.getText());
        OUT.flush();
        if (sample.hasFinish()) {
          OUT.printf(
              "%nfinish: %s, %d tokens%n",
              sample.getFinish().getReason(), sample.getFinish().getUsage().getCompletionTokens());
          if (sample.getFinish().hasError()) {
            report(OUT, StatusProto.toStatusRuntimeException(sample.getFinish().getError()));
          }
        }
      }
    }
  }

  private static GenerateRequest endless() {
    return GenerateRequest.newBuilder()
        .setText(PROMPT)
        .setStopping(Stopping.newBuilder().setIgnoreEos(true))
        .build();
  }

  /** Cancelling the context ends the request: its place in the batch goes to others at once. */
  private void cancel() {
    try (Context.CancellableContext context = Context.current().withCancellation()) {
      context.run(
          () -> {
            int tokens = 0;
            Iterator<GenerateResponse> messages = within(PATIENCE_MS).generate(endless());
            while (messages.hasNext()) {
              for (SampleOutput sample : messages.next().getOutputs().getSamplesList()) {
                tokens += sample.getTokenIdsCount();
              }
              if (tokens >= 5) {
                context.cancel(null);
              }
            }
          });
    } catch (StatusRuntimeException end) {
      if (end.getStatus().getCode() != Status.Code.CANCELLED) {
        throw end;
      }
      OUT.println("cancelled: CANCELLED");
    }
  }

  /** Client and server both watch the deadline: the sample ends with a finish, or the call with a status, or both. */
  private void deadline() {
    String ended = "never";
    try {
      Iterator<GenerateResponse> messages = within(500).generate(endless());
      while (messages.hasNext()) {
        for (SampleOutput sample : messages.next().getOutputs().getSamplesList()) {
          if (sample.hasFinish()) {
            ended = sample.getFinish().getReason().name();
          }
        }
      }
    } catch (StatusRuntimeException end) {
      if (end.getStatus().getCode() != Status.Code.DEADLINE_EXCEEDED) {
        throw end;
      }
      ended = end.getStatus().getCode().name();
    }
    OUT.println("deadline: " + ended);
  }

  private void beRefused() {
    GenerateRequest request =
        GenerateRequest.newBuilder().setText(PROMPT).setSampling(Sampling.newBuilder().setTopP(3)).build();
    try {
      within(PATIENCE_MS).generate(request).forEachRemaining(message -> {});
    } catch (StatusRuntimeException refusal) {
      report(OUT, refusal);
    }
  }

  /** What a failed call tells: a code, and details that say why, where, and when to come back. */
  private static void report(PrintStream to, StatusRuntimeException failure) {
    com.google.rpc.Status status = StatusProto.fromThrowable(failure);
    String reason = "no reason";
    List<String> more = new ArrayList<>();
    try {
      for (Any detail : status.getDetailsList()) {
        if (detail.is(ErrorInfo.class)) {
          reason = detail.unpack(ErrorInfo.class).getReason();
        } else if (detail.is(BadRequest.class)) {
          for (BadRequest.FieldViolation violation : detail.unpack(BadRequest.class).getFieldViolationsList()) {
            more.add("field: " + violation.getField());
          }
        } else if (detail.is(RetryInfo.class)) {
          Duration delay = detail.unpack(RetryInfo.class).getRetryDelay();
          more.add("retry: after " + (delay.getSeconds() * 1000 + delay.getNanos() / 1_000_000) + " ms");
        }
      }
    } catch (InvalidProtocolBufferException broken) {
      more.add("details that cannot be read: " + broken.getMessage());
    }
    to.println("error: " + failure.getStatus().getCode() + ", " + reason);
    to.println("message: " + status.getMessage());
    more.forEach(to::println);
  }
}
